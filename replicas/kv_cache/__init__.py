"""The paged KV cache: blocks, what they hold, and where a pass on a device reads and writes."""

from replicas.kv_cache.allocator import BlockAllocator, OutOfBlocks, first_table
from replicas.kv_cache.cache import PagedCache
from replicas.kv_cache.device_layout import DevicePassLayout, DeviceStepLayout, device_ranges
from replicas.kv_cache.groups import (
    BlockGroup,
    BlockGroups,
    blocks_of_a_pass,
    counted,
    divided_into_groups,
    one_group,
)
from replicas.kv_cache.prefix import Chain
from replicas.kv_cache.shape import (
    SCRAP_BLOCK,
    CacheShape,
    LayerShape,
    TokenRange,
    divided_into_passes,
    stores,
    uniform,
)
