"""Attention over the paged cache by batched products, for the passes of steps on a CPU.

torch's fused attention there takes one row and KV head after the other. Of the few queries of a
step all scores fit into a processor's cache at once, and one batched product for all of them, one
softmax and another product take two thirds of its time.

What layers have in common is set up once for a pass: which numbers are copied where, masks and
buffers. A layer then costs two copies by index, and four operations for each part of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import is_

import numpy as np
import torch

from replicas.paged_cache import PagedCache
from replicas.windows import Part, Window

SCORES_MOST = 1 << 19
"""Scores of all heads of a pass: fused attention, which never stores them, is better beyond."""
_KEPT_GRIDS = 64

Shape = tuple[int, int, int]
"""Query heads, KV heads and their width."""


@dataclass(slots=True)
class _Views:
    """One part's share of the buffers; `items` are its rows x KV heads.

    Gathered items stand one after the other, and each part's in the same memory: a batched product
    gives each core the items that the same core has copied, and they fit into what it keeps.
    """

    runs: torch.Tensor  # [runs], int64
    gathered: torch.Tensor  # [runs, block_size * head_dim]
    mask: torch.Tensor  # [items, group * width, length], or anything where nothing is masked
    masked: int
    queries: torch.Tensor  # [items, group * width, head_dim]
    keys: torch.Tensor  # [items, head_dim, length]
    values: torch.Tensor  # [items, length, head_dim]
    scores: torch.Tensor  # [items, group * width, length]
    out: torch.Tensor  # [items, group * width, head_dim]


class Gathering:
    """What passes read; kept, as those of a step mostly read the same blocks."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._blocks: list[torch.Tensor] = []
        self._runs: list[torch.Tensor] = []

    def runs(self, parts: Sequence[Part]) -> list[torch.Tensor]:  # each [runs], int64
        """Those of each part."""
        blocks = [part.blocks for part in parts]
        if len(blocks) != len(self._blocks) or not all(map(is_, blocks, self._blocks)):
            self._blocks, self._runs = blocks, [self._cache.runs(part) for part in parts]
        return self._runs


class Batched:
    """The attention of one forward pass over gathered keys and values."""

    def __init__(
        self,
        window: Window,
        tokens: int,
        shape: Shape,
        scaling: float,
        cache: PagedCache,
        gathering: Gathering,
    ) -> None:
        """`tokens` are those of the window; see `fits` for which windows."""
        heads, kv_heads, dim = shape
        rows, width = window.rows, window.width
        self._cache = cache
        self._scaling = scaling
        self._tokens = tokens
        parts = window.parts or (window,)
        if window.cells is None:
            self._asked, self._answered = _of_grid(rows, width, shape)
        else:
            self._asked, self._answered = _of_cells(window.cells.numpy(), rows, width, shape)
        self._queries = cache.room(0).new_empty((rows * heads * width, dim))
        self._out = torch.empty_like(self._queries)
        self._parts = []
        asked = 0
        for part, runs in zip(parts, gathering.runs(parts), strict=True):
            items, length = part.rows * kv_heads, part.length
            queries = slice(asked, asked + part.rows * heads * width)
            folded = (items, heads // kv_heads * width, dim)
            gathered = cache.room(runs.shape[0])
            keys, values = gathered.view(items, 2, -1, dim)[:, :, :length].unbind(1)
            mask = part.mask
            if mask is not None:
                whole = (part.rows, kv_heads, heads // kv_heads, width, length)
                mask = mask[:, :, None].expand(whole).reshape(*folded[:2], length)
            self._parts.append(
                _Views(
                    runs=runs,
                    gathered=gathered,
                    mask=self._out[:1, :1] if mask is None else mask,
                    masked=int(mask is not None),
                    queries=self._queries[queries].view(folded),
                    keys=keys.transpose(1, 2),
                    values=values,
                    scores=self._out.new_empty((*folded[:2], length)),
                    out=self._out[queries].view(folded),
                )
            )
            asked = queries.stop

    def __call__(
        self,
        layer_idx: int,
        qkv: torch.Tensor,  # [tokens, heads + 2 * kv_heads, head_dim]
    ) -> torch.Tensor:  # [tokens, heads * head_dim], valid until the next layer
        """The layer's result for its queries; the window's keys and values are written already."""
        torch.index_select(qkv.view(-1, qkv.shape[2]), 0, self._asked, out=self._queries)
        for part in self._parts:
            self._cache.gather(layer_idx, part.runs, part.gathered)
            torch.baddbmm(
                part.mask,
                part.queries,
                part.keys,
                beta=part.masked,
                alpha=self._scaling,
                out=part.scores,
            )
            torch.softmax(part.scores, -1, out=part.scores)
            torch.bmm(part.scores, part.values, out=part.out)
        out = self._out
        if self._answered is not None:
            out = out.index_select(0, self._answered)
        return out.view(self._tokens, -1)


def can_batch(device: torch.device, dtype: torch.dtype) -> bool:
    """Where it is the faster attention."""
    return device.type == "cpu" and dtype == torch.float32


def fits(window: Window, heads: int) -> bool:
    """Whether the scores of a pass are few enough, and its parts are rows of the window."""
    if any(part.first or part.width != window.width for part in window.parts):
        return False  # spans
    return window.rows * window.width * window.length * heads <= SCORES_MOST


Indices = tuple[torch.Tensor, torch.Tensor | None]
"""Of queries among the heads of all tokens, [rows * heads * width], ordered as rows, heads, width;
and of a token's heads among those, [tokens * heads]: None if that is their order. Both int64."""


@lru_cache(maxsize=_KEPT_GRIDS)
def _of_grid(rows: int, width: int, shape: Shape) -> Indices:
    """Where every cell has a token."""
    asked, answered = _of_cells(np.arange(rows * width), rows, width, shape)
    return asked, None if width == 1 else answered


def _of_cells(cells: np.ndarray, rows: int, width: int, shape: Shape) -> Indices:
    """Where token i has cell `cells[i]`; a cell without one asks as the first token does, and
    nobody takes its answer."""
    heads, kv_heads, _ = shape
    token = np.zeros(rows * width, dtype=np.int64)
    token[cells] = np.arange(len(cells))
    head = np.arange(heads)
    asked = token.reshape(rows, 1, width) * (heads + 2 * kv_heads) + head[:, None]
    row, column = np.divmod(cells, width)
    answered = (row * (heads * width) + column)[:, None] + head * width
    return torch.from_numpy(asked.reshape(-1)), torch.from_numpy(answered.reshape(-1))
