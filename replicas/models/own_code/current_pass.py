"""The pass of a model's own code that runs now: what its attention and experts must know."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from replicas.invariant import PassLayout
from replicas.kv_cache import DevicePassLayout, PagedCache
from replicas.models.decoder import LayerAttention

BatchLayout = PassLayout | DevicePassLayout
"""Where a pass reads and writes, on a CPU and on a device."""


@dataclass(slots=True)
class CurrentPass:
    cache: PagedCache
    layout: BatchLayout
    attention: LayerAttention
    writers: frozenset[int]
    """Layers that bring keys and values; others read those of an earlier layer."""
    tokens: int
    """How many of the pass are no padding."""
    layer: int = 0
    """The next layer that attends."""


PASS: ContextVar[CurrentPass | None] = ContextVar("lockstep_pass", default=None)
