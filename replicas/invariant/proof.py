"""The proof at load: in which sizes this processor and library give a token the same bits.

Every product of a model is computed for 1 to 64 tokens, and some more, and compared, bit for bit,
with the same tokens in tiles of 64; numbers of tokens that differ are left out, and passes are
padded to the next one. So are norms, activations and rotations. Attention is tried with its fixed
sizes, from the fastest to the safest. Random numbers do for weights: which kernel runs depends on
shapes, not on values. Results are kept for the process, for many replicas have the same shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch

from replicas.invariant.host_attention import Products, attend
from replicas.invariant.ops import COUNTS, TILE, Arithmetic, Product

_WEIGHT_NUMBERS_MOST = 1 << 27
"""Larger weights are tried with fewer outputs: half a gigabyte twice is enough for a trial."""
_SIZES = (
    (4, 192, False),
    (4, 128, False),
    (8, 128, False),
    (16, 64, False),
    (12, 128, True),
    (4, 64, True),
)
"""Query units, pieces, and whether a product sees one unit: from the fastest to the safest."""
VECTOR = 16
"""Numbers that a CPU computes at once, at most: fewer may be rounded otherwise."""
_QUERIES_MOST = 192
_LENGTHS = (1, 40, 100, 190, 192, 250, 500)
_ITEMS = (1, 2, 3, 8, 24)

RowFunction = Callable[[torch.Tensor], torch.Tensor]
"""[tokens, width] to [tokens, width of its own]; may change what it is given."""

_log = logging.getLogger("lockstep.replica")


def prove(
    products: Iterable[tuple[int, int]],  # (in, out) of each weight
    attention: Iterable[tuple[int, float | None, bool]],  # width of heads, soft cap, sinks
    rowwise: Iterable[tuple[RowFunction, int]],  # and the width of its input
    prepack: bool,
    whole_vectors: bool = False,
) -> Arithmetic:
    """The arithmetic of models with these products, attention heads and row-wise functions (norms,
    activations, rotation), on a CPU in float32.

    `whole_vectors`: the models have other functions, too, so numbers of tokens are multiples of
    what a CPU computes at once.
    """
    threads = torch.get_num_threads()
    tokens = same_counts(products, prepack)
    for function, width in rowwise:
        tokens &= _row_counts(function, width)
    if whole_vectors:
        tokens = {count for count in tokens if count % VECTOR == 0}
    for sizes in _SIZES if tokens else ():
        if all(_attention_holds(*form, *sizes, threads) for form in set(attention)):
            unit, piece, one_unit = sizes
            return Arithmetic(tuple(sorted(tokens)), unit, one_unit, piece, proven=True)
    _log.warning(
        "no sizes of %s give the same bits here whatever the batch",
        "attention" if tokens else "products",
    )
    return Arithmetic(COUNTS)


def same_counts(
    products: Iterable[tuple[int, int]],  # (in, out) of each weight
    prepack: bool,
) -> set[int]:
    """The numbers of tokens for which each of them gives a token the bits it has among many."""
    tokens = set(COUNTS)
    for fan_in, fan_out in set(products):
        tokens &= _token_counts(fan_in, fan_out, prepack, torch.get_num_threads())
    return tokens


def _row_counts(function: RowFunction, width: int) -> set[int]:
    """Numbers of tokens for which a row-wise function gives each row the bits that it gives among
    many: code for vectors and for what is left behind them may round differently."""
    x = 4 * torch.randn(COUNTS[-1], width, generator=torch.Generator().manual_seed(width))
    whole = function(x.clone())
    return {count for count in COUNTS if torch.equal(function(x[-count:].clone()), whole[-count:])}


@lru_cache(maxsize=256)
def _token_counts(fan_in: int, fan_out: int, prepack: bool, threads: int) -> frozenset[int]:
    """Numbers of tokens that get the bits of TILE tokens, whatever their places; none if places
    matter."""
    generator = torch.Generator().manual_seed(fan_in)
    fan_out = max(1, min(fan_out, _WEIGHT_NUMBERS_MOST // fan_in))
    weight = torch.randn(fan_out, fan_in, generator=generator)
    product = Product.of(weight, None, prepack)
    x = torch.randn(COUNTS[-1], fan_in, generator=generator)
    x *= torch.logspace(-2, 2, fan_in)  # sums in another order shall differ
    tiles = torch.split(x, TILE)
    whole = torch.cat([product(tile) for tile in tiles])
    for shift in (1, 17, 32, 63):
        if not torch.equal(product(tiles[0].roll(shift, 0)), whole[:TILE].roll(shift, 0)):
            return frozenset()
    return frozenset(
        count
        for count in COUNTS
        if torch.equal(product(x[:count]), whole[:count])
        and torch.equal(product(x[-count:].clone()), whole[-count:])
    )


@lru_cache(maxsize=64)
def _attention_holds(
    dim: int,
    soft_cap: float | None,
    sinks: bool,
    query_unit: int,
    piece: int,
    one_unit: bool,
    threads: int,
) -> bool:
    """Whether a query's result is the same in groups of all kinds, over any padded length."""
    generator = torch.Generator().manual_seed(dim)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    wide = sorted({query_unit, 2 * query_unit, 3 * query_unit, 5 * query_unit, _QUERIES_MOST})
    arithmetic = Arithmetic((TILE,), query_unit, one_unit, piece)
    unit = arithmetic.kv_unit
    for length in _LENGTHS:
        query, keys, values = 3 * noise(dim), 2 * noise(length, dim), noise(length, dim)
        expected: torch.Tensor | None = None
        for number, queries in enumerate(wide):
            for items in _ITEMS:
                for more in (0, unit, 3 * unit, 320):
                    reach = -(-length // unit) * unit + more
                    item = (number + more) % items
                    q, k = noise(items, queries, dim), noise(items, reach, dim)
                    v = noise(items, reach, dim)
                    # At every place: kernels take so many rows at once, and others what is left.
                    q[item], k[item, :length], v[item, :length] = query, keys, values
                    got = _attended(arithmetic, q, k, v, length, soft_cap, sinks)[item]
                    if expected is None:
                        expected = got[0].clone()
                    if not torch.equal(got, expected.expand_as(got)):
                        return False
    return True


def _attended(
    arithmetic: Arithmetic,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    length: int,
    soft_cap: float | None,
    sinks: bool,
) -> torch.Tensor:
    out, sink = torch.empty_like(q), None
    products = Products.of(arithmetic, q * q.shape[-1] ** -0.5, k, v, out, sinks)
    if products.beyond is not None:
        sink = torch.full_like(products.beyond, -torch.inf)
        sink[..., 0] = 0.5
    hidden = None
    if length < k.shape[1]:
        tail = products.scores[:, :, length:]
        hidden = (tail, torch.full_like(tail, -torch.inf))
    attend(products, hidden, soft_cap, sink)
    return out
