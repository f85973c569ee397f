"""The attention backend of a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.invariant.attention import HostAttention
from replicas.invariant.layout import PassLayout, StepLayout, ranges_layout
from replicas.invariant.ops import Arithmetic
from replicas.kv_cache import CacheShape, PagedCache, TokenRange


class HostBackend:
    """Attention by fixed pieces over what a pass gathers."""

    name: str = "gather"

    def __init__(self, cache: PagedCache, shape: CacheShape, arithmetic: Arithmetic) -> None:
        self.cache = cache
        self.shape = shape
        self.arithmetic = arithmetic

    def begin(self, layout: PassLayout, stride: int) -> HostAttention:
        return HostAttention(layout, self.cache, self.shape, self.arithmetic, stride)

    def step_layout(self, table: torch.Tensor, starts: Sequence[int], width: int) -> StepLayout:
        return StepLayout(table, starts, width, self.shape, self.arithmetic)

    def ranges_layout(self, table: torch.Tensor, ranges: Sequence[TokenRange]) -> PassLayout:
        return ranges_layout(table, ranges, self.shape, self.arithmetic)
