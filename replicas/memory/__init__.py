"""The memory plan: what weights, buffers and KV blocks get of what there is."""

from replicas.memory.buffers import Buffers, ModelShape, Workload
from replicas.memory.plan import (
    MemoryPlan,
    PairShape,
    TooLittleMemory,
    check_memory,
    free_bytes,
    in_mib,
    pair_shape,
    pair_shape_of,
    plan_memory,
    weight_bytes,
)

__all__ = [
    "Buffers",
    "MemoryPlan",
    "ModelShape",
    "PairShape",
    "TooLittleMemory",
    "Workload",
    "check_memory",
    "free_bytes",
    "in_mib",
    "pair_shape",
    "pair_shape_of",
    "plan_memory",
    "weight_bytes",
]
