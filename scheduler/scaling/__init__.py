"""How many replicas a load needs, and which shard takes a request."""

from scheduler.scaling.autoscaling import (
    LOOK_S,
    AutoscalingConfig,
    CapacityMeter,
    ScalingState,
    unseen,
    wanted_replicas,
)
from scheduler.scaling.shards import ShardLoad, choose_shard, merged_status, shard_of_rank
