"""How many replicas a load needs, and which shard takes a request."""

from scheduler.scaling.autoscaling import (
    AutoscalingConfig,
    CapacityMeter,
    Load,
    ScalingState,
    pool_load,
    unseen,
    wanted_replicas,
)
from scheduler.scaling.shards import (
    ShardLoad,
    choose_shard,
    merged_status,
    next_shard,
    shard_of_rank,
)

__all__ = [
    "AutoscalingConfig",
    "CapacityMeter",
    "Load",
    "ScalingState",
    "ShardLoad",
    "choose_shard",
    "merged_status",
    "next_shard",
    "pool_load",
    "shard_of_rank",
    "unseen",
    "wanted_replicas",
]
