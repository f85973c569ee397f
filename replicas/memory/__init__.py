"""The memory plan: what weights, buffers and KV blocks get of what there is."""

from replicas.memory.buffers import Buffers, PassBytes, Workload
from replicas.memory.measure import measured_passes
from replicas.memory.plan import MemoryPlan, check_memory, free_bytes, in_mib, plan_memory
from replicas.memory.shapes import COPIED_MOST, DraftMemory, PairShape
