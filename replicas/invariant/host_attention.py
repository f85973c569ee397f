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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from replicas.invariant.layout import PassLayout, RowGroup, StepLayout, ranges_layout
from replicas.invariant.ops import Arithmetic
from replicas.kv_cache import LayerShape, PagedCache, TokenRange


def attend(
    products: Products,
    hidden: tuple[torch.Tensor, torch.Tensor] | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Softmax attention of every item; the queries are scaled already.

    `hidden` is a view of some scores, and what is added to them: 0, or -inf where a query does not
    see a position. `sinks`, as wide as `products.beyond`, are the scores there.
    """
    for queries, scores in products.asked:
        torch.bmm(queries, products.keys, out=scores)
    if soft_cap is not None:
        products.scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if hidden is not None:
        hidden[0].add_(hidden[1])
    if products.beyond is not None:
        assert sinks is not None
        products.beyond.copy_(sinks)
    torch.softmax(products.weighed, -1, out=products.weighed)
    for out, pieces in products.answered:
        weights, values = pieces[0]
        torch.bmm(weights, values, out=out)
        for weights, values in pieces[1:]:
            torch.baddbmm(out, weights, values, out=out)


TensorPair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Products:
    """The products of one group: views of its buffers, made once."""

    keys: torch.Tensor  # [items, width, length]
    scores: torch.Tensor  # [items, queries, length], overwritten
    weighed: torch.Tensor
    """All that the softmax goes over: the scores, and what is beyond."""
    beyond: torch.Tensor | None  # [items, queries, kv_unit]
    """Scores of no position, for sinks."""
    asked: list[TensorPair]
    """Queries [items, some queries, width] and their scores."""
    answered: list[tuple[torch.Tensor, list[TensorPair]]]
    """Results [items, some queries, width], overwritten, and the pieces that they sum: weights
    [items, some queries, positions] and values [items, positions, width]."""

    @classmethod
    def of(
        cls,
        arithmetic: Arithmetic,
        queries: torch.Tensor,  # [items, queries, width]
        keys: torch.Tensor,  # [items, length, width]
        values: torch.Tensor,  # [items, length, width]
        out: torch.Tensor,  # [items, queries, width]
        sinks: bool = False,
    ) -> Products:
        length = keys.shape[1]
        beyond = arithmetic.kv_unit if sinks else 0
        weighed = torch.empty((*queries.shape[:2], length + beyond))
        scores = weighed[..., :length]
        tail = weighed[..., length:] if sinks else None
        products = cls(keys.transpose(1, 2), scores, weighed, tail, [], [])
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

    blocks: Any
    """Those of the rows, as a layout has them."""
    gathered: torch.Tensor  # [runs, block_size * width]
    converted: torch.Tensor | None
    """The same in float32, of a cache that is not."""
    products: Products
    hidden: tuple[torch.Tensor, torch.Tensor] | None
    sinks: torch.Tensor | None  # [kv_heads, queries, kv_unit], -inf but for the first ones
    head: torch.Tensor  # [queries], int64: of each query, among those that share a KV head
    runs: dict[int, torch.Tensor] = field(default_factory=dict)  # each [runs], int64
    """Where the blocks lie, by group of layers."""


class HostAttention:
    """The attention of a forward pass; what layers of the same needs share is worked out once."""

    def __init__(self, layout: PassLayout, cache: PagedCache, arithmetic: Arithmetic) -> None:
        self._layout, self._cache, self._arithmetic = layout, cache, arithmetic
        self._alike: dict[int, _AlikeLayers] = {}

    def __call__(
        self,
        layer: int,
        queries: torch.Tensor,  # [padded tokens, vectors, head_dim], the heads first
        scaling: float,
        sinks: torch.Tensor | None = None,  # [heads]
    ) -> torch.Tensor:  # [padded tokens, heads * value_dim], valid until the next layer
        """The layer's result; keys and values of the pass are in the cache already."""
        first = self._cache.first_alike[layer]
        alike = self._alike.get(first)
        if alike is None:
            of_pass = (self._layout, self._cache, self._arithmetic)
            alike = _AlikeLayers(*of_pass, self._cache.needs[layer], queries.shape[1])
            self._alike[first] = alike
        return alike.attend(self._cache.needs[layer].store, queries, scaling, sinks)


class _AlikeLayers:
    """Buffers and indices of a pass for layers of the same needs."""

    def __init__(
        self,
        layout: PassLayout,
        cache: PagedCache,
        arithmetic: Arithmetic,
        needs: LayerShape,
        vectors: int,
    ) -> None:
        """`vectors` per token are in the queries that layers bring, the heads first."""
        self._cache, self._needs = cache, needs
        self._asked, self._answered = _indices(layout, needs, arithmetic, vectors)
        width, kv_heads, block_size = needs.width, needs.kv_heads, cache.shape.block_size
        # Queries narrower than what the cache holds are padded with 0, as keys are.
        self._queries = torch.zeros((self._asked.shape[0], width))
        self._out = torch.empty_like(self._queries)
        self._groups = []
        begin = 0
        for group in layout.groups:
            rows, tokens = group.tokens.shape
            wide = _queries_of(tokens, needs, arithmetic)
            items = rows * kv_heads
            own = slice(begin, begin + items * wide)
            runs = 2 * items * (group.length // block_size)
            gathered = cache.room(runs, block_size * width)
            converted = None
            if gathered.dtype is not torch.float32:
                converted = torch.empty(gathered.shape)
            both = gathered if converted is None else converted
            keys, values = both.view(items, 2, group.length, width).unbind(1)
            products = Products.of(
                arithmetic,
                self._queries[own].view(items, wide, width),
                keys,
                values,
                self._out[own].view(items, wide, width),
                needs.sinks,
            )
            hidden = _hidden(group, products.scores, needs)
            sinks = None
            if needs.sinks:
                sinks = torch.full((kv_heads, wide, arithmetic.kv_unit), -torch.inf)
            head = (torch.arange(wide) // tokens).clamp_(max=needs.heads // kv_heads - 1)
            views = _Views(group.blocks, gathered, converted, products, hidden, sinks, head)
            self._groups.append(views)
            begin = own.stop

    def attend(
        self,
        store: int,
        queries: torch.Tensor,
        scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        needs = self._needs
        flat = queries.reshape(-1, queries.shape[2])
        if flat.dtype is torch.float32 and needs.head_dim == needs.width:
            torch.index_select(flat, 0, self._asked, out=self._queries)
        else:
            self._queries[:, : needs.head_dim].copy_(flat.index_select(0, self._asked))
        self._queries.mul_(scaling)
        for group in self._groups:
            self._cache.gather(store, self._runs(group, store), group.gathered)
            if group.converted is not None:
                group.converted.copy_(group.gathered)
            attend(group.products, group.hidden, needs.soft_cap, self._sinks(group, sinks))
        out = self._out.index_select(0, self._answered)
        if needs.value_dim < needs.width:
            out = out[:, : needs.value_dim]
        out = out.reshape(queries.shape[0], -1)
        return out if out.dtype is queries.dtype else out.to(queries.dtype)

    def _runs(self, group: _Views, store: int) -> torch.Tensor:
        which = self._cache.group_of(store)
        if which not in group.runs:
            blocks = self._cache.own(store, group.blocks)
            group.runs[which] = self._cache.runs(blocks, self._needs.kv_heads)
        return group.runs[which]

    def _sinks(self, group: _Views, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """Those of every query of every item, [items, queries, kv_unit]."""
        if group.sinks is None:
            return None
        assert sinks is not None, "a layer with sinks brings them"
        kv_heads = group.sinks.shape[0]
        group.sinks[:, :, 0] = sinks.view(kv_heads, -1)[:, group.head]
        rows = group.products.scores.shape[0] // kv_heads
        return group.sinks.repeat(rows, 1, 1)


def _queries_of(width: int, needs: LayerShape, arithmetic: Arithmetic) -> int:
    """Queries of one item: all heads that share a KV head, `width` tokens each, padded."""
    unit = arithmetic.query_unit
    return -(-width * (needs.heads // needs.kv_heads) // unit) * unit


def _hidden(
    group: RowGroup, scores: torch.Tensor, needs: LayerShape
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The scores of positions that not every query sees, and what hides them."""
    seen, hidden = group.hidden_in(needs)
    if seen >= group.length:
        return None
    rows, width = group.tokens.shape
    wide = scores.shape[1]
    # Of one token per row it serves all queries.
    if width > 1:
        hidden = hidden[:, np.arange(wide) % width]
    view = scores.view(rows, needs.kv_heads, wide, -1)[..., seen:]
    return view, torch.from_numpy(hidden)[:, None]


Indices = tuple[torch.Tensor, torch.Tensor]
"""Of every query of every item among the vectors of all tokens, [items * queries]; and of every
head of every token among those, [padded tokens * heads]. Both int64."""


def _indices(
    layout: PassLayout, needs: LayerShape, arithmetic: Arithmetic, vectors: int
) -> Indices:
    padded = layout.positions.shape[0]
    heads, kv_heads = needs.heads, needs.kv_heads
    per_head = heads // kv_heads
    asked: list[Any] = []
    # Padding takes the answer of the first query.
    answered = np.zeros((padded, heads), np.int64)
    begin = 0
    for group in layout.groups:
        rows, width = group.tokens.shape
        wide = _queries_of(width, needs, arithmetic)
        queries = np.arange(wide)
        # Padding asks as the last query of the last head does.
        head = np.minimum(queries // width, per_head - 1)
        token = group.tokens[:, None, queries % width]  # [rows, 1, wide]
        first = np.arange(kv_heads)[:, None] * per_head
        asked.append((token * vectors + (first + head)).reshape(-1))
        item = np.arange(rows)[:, None, None] * kv_heads + np.arange(heads) // per_head
        within = np.arange(heads) % per_head * width + np.arange(width)[:, None]
        answered[group.tokens] = begin + item * wide + within
        begin += rows * kv_heads * wide
    return torch.from_numpy(np.concatenate(asked)), torch.from_numpy(answered.reshape(-1))


class HostBackend:
    """Attention by fixed pieces over what a pass gathers."""

    name: str = "gather"

    def __init__(self, cache: PagedCache, arithmetic: Arithmetic) -> None:
        self.cache = cache
        self.arithmetic = arithmetic

    def begin(self, layout: PassLayout) -> HostAttention:
        return HostAttention(layout, self.cache, self.arithmetic)

    def step_layout(self, table: torch.Tensor, starts: Sequence[int], width: int) -> StepLayout:
        return StepLayout(table, starts, width, self.cache.shape, self.arithmetic)

    def ranges_layout(self, table: torch.Tensor, ranges: Sequence[TokenRange]) -> PassLayout:
        return ranges_layout(table, ranges, self.cache.shape, self.arithmetic)
