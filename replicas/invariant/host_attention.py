"""Attention over the paged cache on a CPU, whose bits for a query depend on its own row alone.

Keys and values of a group of rows are copied together, one batched product gives all scores, one
softmax their weights. What a matrix library may do by shape is taken away from it:

- The queries of a product are padded to a multiple of `query_unit`: with fewer a library takes
  other kernels. Where it takes others for more as well, a product sees just one unit.
- Queries are scaled before the product: a library that scales in it does so before or after its
  sums, by shape.
- Scores of a position depend on one key, so their number does not matter; it is a multiple of
  `kv_unit`, the width of a vector.
- Values are summed over pieces of at most `piece` positions, piece after piece. A longer sum would
  be split by its own length. Positions beyond a row's own have the weight 0 and add nothing.

Which sizes have the property here, `replicas.invariant.proof` shows when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replicas.invariant.layout import PassLayout, RowGroup, StepLayout, ranges_layout
from replicas.invariant.ops import Arithmetic
from replicas.kv_cache import CacheShape, PagedCache, TokenRange


def attend(products: Products, hidden: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
    """Softmax attention of every item; the queries are scaled already.

    `hidden` is a view of some scores, and what is added to them: 0, or -inf where a query does not
    see a position.
    """
    for queries, scores in products.asked:
        torch.bmm(queries, products.keys, out=scores)
    if hidden is not None:
        hidden[0].add_(hidden[1])
    torch.softmax(products.scores, -1, out=products.scores)
    for out, pieces in products.answered:
        weights, values = pieces[0]
        torch.bmm(weights, values, out=out)
        for weights, values in pieces[1:]:
            torch.baddbmm(out, weights, values, out=out)


TensorPair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Products:
    """The products of one group: views of its buffers, made once."""

    keys: torch.Tensor  # [items, head_dim, length]
    scores: torch.Tensor  # [items, queries, length], overwritten
    asked: list[TensorPair]
    """Queries [items, some queries, head_dim] and their scores."""
    answered: list[tuple[torch.Tensor, list[TensorPair]]]
    """Results [items, some queries, head_dim], overwritten, and the pieces that they sum: weights
    [items, some queries, positions] and values [items, positions, head_dim]."""

    @classmethod
    def of(
        cls,
        arithmetic: Arithmetic,
        queries: torch.Tensor,  # [items, queries, head_dim]
        keys: torch.Tensor,  # [items, length, head_dim]
        values: torch.Tensor,  # [items, length, head_dim]
        out: torch.Tensor,  # [items, queries, head_dim]
    ) -> Products:
        scores = torch.empty((*queries.shape[:2], keys.shape[1]))
        products = cls(keys.transpose(1, 2), scores, [], [])
        at_once = arithmetic.query_unit if arithmetic.one_unit else queries.shape[1]
        value_pieces = torch.split(values, arithmetic.piece, 1)
        for begin in range(0, queries.shape[1], at_once):
            some = slice(begin, begin + at_once)
            weights = torch.split(scores[:, some], arithmetic.piece, 2)
            products.asked.append((queries[:, some], scores[:, some]))
            products.answered.append((out[:, some], list(zip(weights, value_pieces, strict=True))))
        return products


@dataclass(slots=True)
class _Views:
    """One group's share of the buffers; `items` are its rows x KV heads."""

    runs: torch.Tensor  # [runs], int64
    gathered: torch.Tensor  # [runs, block_size * head_dim]
    converted: torch.Tensor | None
    """The same in float32, of a cache that is not."""
    products: Products
    hidden: tuple[torch.Tensor, torch.Tensor] | None


class HostAttention:
    """The attention of a forward pass; what its layers share is worked out once."""

    def __init__(
        self,
        layout: PassLayout,
        cache: PagedCache,
        arithmetic: Arithmetic,
        stride: int,
    ) -> None:
        """`stride`: vectors per token in the queries that layers bring, the heads first."""
        self._cache, shape = cache, cache.shape
        self._asked, self._answered = _indices(layout, shape, arithmetic, stride)
        dim, kv_heads = shape.head_dim, shape.kv_heads
        self._queries = torch.empty((self._asked.shape[0], dim))
        self._out = torch.empty_like(self._queries)
        self._groups = []
        begin = 0
        for group in layout.groups:
            rows, width = group.tokens.shape
            wide = _queries_of(width, shape, arithmetic)
            items = rows * kv_heads
            own = slice(begin, begin + items * wide)
            runs = cache.runs(group.blocks)
            gathered = cache.room(runs.shape[0])
            converted = None
            if gathered.dtype is not torch.float32:
                converted = torch.empty(gathered.shape)
            both = gathered if converted is None else converted
            keys, values = both.view(items, 2, group.length, dim).unbind(1)
            products = Products.of(
                arithmetic,
                self._queries[own].view(items, wide, dim),
                keys,
                values,
                self._out[own].view(items, wide, dim),
            )
            hidden = _hidden(group, products.scores, kv_heads)
            self._groups.append(_Views(runs, gathered, converted, products, hidden))
            begin = own.stop

    def __call__(
        self,
        layer: int,
        queries: torch.Tensor,  # [padded tokens, stride, head_dim]
        scaling: float,
    ) -> torch.Tensor:  # [padded tokens, heads * head_dim], valid until the next layer
        """The layer's result; keys and values of the pass are in the cache already."""
        flat = queries.reshape(-1, queries.shape[2])
        if flat.dtype is torch.float32:
            torch.index_select(flat, 0, self._asked, out=self._queries)
        else:
            self._queries.copy_(flat.index_select(0, self._asked))
        self._queries.mul_(scaling)
        for group in self._groups:
            self._cache.gather(layer, group.runs, group.gathered)
            if group.converted is not None:
                group.converted.copy_(group.gathered)
            attend(group.products, group.hidden)
        out = self._out.index_select(0, self._answered).view(queries.shape[0], -1)
        return out if out.dtype is queries.dtype else out.to(queries.dtype)


def _queries_of(width: int, shape: CacheShape, arithmetic: Arithmetic) -> int:
    """Queries of one item: all heads that share a KV head, `width` tokens each, padded."""
    unit = arithmetic.query_unit
    return -(-width * (shape.heads // shape.kv_heads) // unit) * unit


def _hidden(
    group: RowGroup, scores: torch.Tensor, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The scores of positions that not every query sees, and what hides them."""
    if group.seen >= group.length:
        return None
    rows, width = group.tokens.shape
    wide = scores.shape[1]
    hidden = group.hidden  # of one token per row it serves all queries
    if width > 1:
        hidden = hidden[:, np.arange(wide) % width]
    view = scores.view(rows, kv_heads, wide, group.length)[..., group.seen :]
    return view, torch.from_numpy(hidden)[:, None]


Indices = tuple[torch.Tensor, torch.Tensor]
"""Of every query of every item among the vectors of all tokens, [items * queries]; and of every
head of every token among those, [padded tokens * heads]. Both int64."""


def _indices(layout: PassLayout, shape: CacheShape, arithmetic: Arithmetic, stride: int) -> Indices:
    padded = layout.positions.shape[0]
    per_head = shape.heads // shape.kv_heads
    asked: list[Any] = []
    # Padding takes the answer of the first query.
    answered = np.zeros((padded, shape.heads), np.int64)
    begin = 0
    for group in layout.groups:
        rows, width = group.tokens.shape
        wide = _queries_of(width, shape, arithmetic)
        queries = np.arange(wide)
        # Padding asks as the last query of the last head does.
        head = np.minimum(queries // width, per_head - 1)
        token = group.tokens[:, None, queries % width]  # [rows, 1, wide]
        first = np.arange(shape.kv_heads)[:, None] * per_head
        asked.append((token * stride + (first + head)).reshape(-1))
        item = np.arange(rows)[:, None, None] * shape.kv_heads + np.arange(shape.heads) // per_head
        within = np.arange(shape.heads) % per_head * width + np.arange(width)[:, None]
        answered[group.tokens] = begin + item * wide + within
        begin += rows * shape.kv_heads * wide
    return torch.from_numpy(np.concatenate(asked)), torch.from_numpy(answered.reshape(-1))


class HostBackend:
    """Attention by fixed pieces over what a pass gathers."""

    name: str = "gather"

    def __init__(self, cache: PagedCache, arithmetic: Arithmetic) -> None:
        self.cache = cache
        self.arithmetic = arithmetic

    def begin(self, layout: PassLayout, stride: int) -> HostAttention:
        return HostAttention(layout, self.cache, self.arithmetic, stride)

    def step_layout(self, table: torch.Tensor, starts: Sequence[int], width: int) -> StepLayout:
        return StepLayout(table, starts, width, self.cache.shape, self.arithmetic)

    def ranges_layout(self, table: torch.Tensor, ranges: Sequence[TokenRange]) -> PassLayout:
        return ranges_layout(table, ranges, self.cache.shape, self.arithmetic)
