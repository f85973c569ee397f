"""How many replicas a load needs, and which shard takes a request."""

from scheduler.scaling.autoscaling import (
    LOOK_S as LOOK_S,
    AutoscalingConfig as AutoscalingConfig,
    CapacityMeter as CapacityMeter,
    ScalingState as ScalingState,
    unseen as unseen,
    wanted_replicas as wanted_replicas,
)
from scheduler.scaling.shards import (
    ShardLoad as ShardLoad,
    choose_shard as choose_shard,
    merged_status as merged_status,
    shard_of_rank as shard_of_rank,
)
