"""What index arithmetic must know of a replica's cache and model, and how ranges become passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SCRAP_BLOCK = 0
"""A block of no sequence: padding is written there and never attended to."""

TokenRange = tuple[int, int]
"""Positions [begin, end) of a row."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the attention of one layer needs: all that backends, cache and memory plan know of it.

    A query sees the positions up to its own, fewer with a `window` or a `chunk`. Its weights are
    the softmax of scaled products with the keys.
    """

    heads: int
    kv_heads: int
    head_dim: int
    """Numbers of a query, and of a key."""
    value_dim: int
    window: int | None = None
    """Position p sees (p - window, p]."""
    chunk: int | None = None
    """Position p sees from chunk * (p // chunk) on."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap)."""
    sinks: bool = False
    """Each head has a learned score beside those of its keys, which weighs no value."""
    store: int = 0
    """The layer of the cache that it reads: its own, or an earlier layer's."""

    @property
    def width(self) -> int:
        """Numbers of a key, and of a value, in the cache: the shorter ones are padded with 0."""
        return max(self.head_dim, self.value_dim)

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one position."""
        return 2 * self.kv_heads * self.width

    @property
    def full(self) -> bool:
        """Whether a query sees all positions up to its own."""
        return self.window is None and self.chunk is None


def uniform(layers: int, heads: int, kv_heads: int, head_dim: int) -> tuple[LayerShape, ...]:
    """So many layers with the usual attention, each with keys and values of its own."""
    return tuple(
        LayerShape(heads, kv_heads, head_dim, head_dim, store=store) for store in range(layers)
    )


def stores(layers: Sequence[LayerShape]) -> list[LayerShape]:
    """The layers that have keys and values of their own, in the order of the cache."""
    return list({layer.store: layer for layer in reversed(layers)}.values())[::-1]


@dataclass(frozen=True, slots=True)
class CacheShape:
    block_size: int
    context_len: int
    """Positions in use are below it; padding is clamped to it."""
    heads: int
    kv_heads: int
    head_dim: int
    """Of the layer that reads the most."""
    tile: int = 1
    """A pass on a device computes a multiple of so many tokens."""

    @classmethod
    def of(
        cls, block_size: int, context_len: int, layers: Sequence[LayerShape], tile: int = 1
    ) -> CacheShape:
        most = max(layers, key=lambda layer: (layer.kv_numbers, layer.heads))
        return cls(block_size, context_len, most.heads, most.kv_heads, most.width, tile)


def divided_into_passes(
    ranges: Sequence[TokenRange], tokens_most: int
) -> Iterator[list[tuple[int, TokenRange]]]:
    """The ranges in passes of at most so many tokens: which rows, and what of each is in the pass.

    A range goes into several passes, in order, where it fills up one of them.
    """
    one_pass: list[tuple[int, TokenRange]] = []
    left = tokens_most
    for row, (begin, end) in enumerate(ranges):
        while begin < end:
            stop = min(end, begin + left)
            one_pass.append((row, (begin, stop)))
            left -= stop - begin
            begin = stop
            if not left:
                yield one_pass
                one_pass, left = [], tokens_most
    if one_pass:
        yield one_pass
