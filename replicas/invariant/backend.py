"""The attention backend of a CPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from replicas.invariant.attention import HostAttention
from replicas.invariant.layout import PassLayout, StepLayout, ranges_layout
from replicas.invariant.ops import Arithmetic
from replicas.kv_cache import CacheShape, PagedCache, TokenRange

_KEPT = 16
"""Shapes of passes whose buffers are kept: those of steps come again and again."""


class HostBackend:
    """Attention by fixed pieces over what a pass gathers."""

    name: str = "gather"
    reads_apart: bool = True
    """A row reads about as far as its own KV goes."""

    def __init__(self, cache: PagedCache, shape: CacheShape, arithmetic: Arithmetic) -> None:
        self.cache = cache
        self.shape = shape
        self.arithmetic = arithmetic
        self._kept: OrderedDict[tuple[object, ...], HostAttention] = OrderedDict()

    def begin(self, layout: PassLayout, stride: int) -> HostAttention:
        shape = tuple((*group.tokens.shape, group.length) for group in layout.groups)
        key = (shape, layout.positions.shape[0], stride)
        attention = None if layout.step is None else self._kept.pop(key, None)
        if attention is None:
            attention = HostAttention(layout, self.cache, self.shape, self.arithmetic, stride)
        if layout.step is not None:
            self._kept[key] = attention
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        attention.enter(layout)
        return attention

    def step_layout(self, table: torch.Tensor, starts: Sequence[int], width: int) -> StepLayout:
        return StepLayout(table, starts, width, self.shape, self.arithmetic)

    def ranges_layout(self, table: torch.Tensor, ranges: Sequence[TokenRange]) -> PassLayout:
        return ranges_layout(table, ranges, self.shape, self.arithmetic)
