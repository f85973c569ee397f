"""The paged KV cache: blocks, what they hold, and where a pass reads and writes."""

from replicas.kv_cache.allocator import BlockAllocator, OutOfBlocks
from replicas.kv_cache.cache import PagedCache
from replicas.kv_cache.host_layout import (
    SCRAP_BLOCK,
    CacheShape,
    PassLayout,
    RowGroup,
    StepLayout,
    TokenRange,
    passes,
    ranges_layout,
)
from replicas.kv_cache.prefix import Chain, root_key

__all__ = [
    "SCRAP_BLOCK",
    "BlockAllocator",
    "CacheShape",
    "Chain",
    "OutOfBlocks",
    "PagedCache",
    "PassLayout",
    "RowGroup",
    "StepLayout",
    "TokenRange",
    "passes",
    "ranges_layout",
    "root_key",
]
