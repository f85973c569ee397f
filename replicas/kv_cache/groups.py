"""Groups of layers by what they keep of a text: each has a block table of its own.

A layer with a window or a chunk never reads again what lies before every future query's, so its
blocks go back while the sequence goes on. A layer that sees everything keeps everything. All blocks
are of one size: those of one table hold keys and values of `slots` layers, so any of them serves
any table, and a replica's memory is one pool of them however long its sequences are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.kv_cache.shape import LayerShape, stores
from scheduler.messages import KvGroups, blocks_taken

AHEAD = 64
"""Positions that a batch of steps may write behind a row's content: what layers with a window keep
beside it. At least what one step with the most draft tokens writes."""
_TABLES_MOST = 8
"""Each table costs index arithmetic in every pass."""

_Seen = tuple[int | None, int | None]
"""Window and chunk."""
_ALL: _Seen = (None, None)


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers of the cache that share a block table."""

    stores: tuple[int, ...]
    """Those whose keys and values lie in its blocks: the first in slot 0 of a block, and so on."""
    window: int | None = None
    """No query sees positions of these layers that are so far before it, or farther."""
    chunk: int | None = None
    """No query sees positions before its own chunk of so many."""

    @property
    def keeps_all(self) -> bool:
        return self.window is None and self.chunk is None

    def first_block(self, settled: int, block_size: int) -> int:
        """The first block that any query from position `settled` on sees, or that a row needs which
        begins with the full blocks up to there."""
        position = settled - settled % block_size
        if self.window is not None:
            return max(position - self.window + 1, 0) // block_size
        if self.chunk is not None:
            return (position - position % self.chunk) // block_size
        return 0

    def blocks_most(self, block_size: int) -> int | None:
        """Blocks that a sequence has at most between two passes, and in a batch of steps; None: as
        many as its text has."""
        seen = self.window or self.chunk
        if seen is None:
            return None
        # Before the last full block of a text; this one and what a batch writes.
        return -(-(seen - 1) // block_size) + 1 - -AHEAD // block_size


BlockGroups = tuple[BlockGroup, ...]
"""Of all layers of a cache; those that keep all first."""


ALL_KEPT: BlockGroups = (BlockGroup(()),)
"""A table of blocks whose layers are of no concern."""


def one_group(layers: Sequence[LayerShape]) -> BlockGroups:
    """A single table for all layers, which keep the whole text."""
    return (BlockGroup(tuple(range(len(stores(layers))))),)


def divided_into_groups(
    layers: Sequence[LayerShape], block_size: int, context_len: int, beside: int = 0
) -> BlockGroups:
    """The groups with which one sequence of full context takes the least memory.

    `beside`: numbers per position that each block holds for something else, a drafter's layers,
    which read the first table: then it keeps all. One table serves all layers where more of them
    save nothing, and where layers are of different widths: blocks have one size.
    """
    one = one_group(layers)
    of_stores = stores(layers)
    kinds: dict[_Seen, list[int]] = {}
    for store, seen in enumerate(_seen(layers)):
        kinds.setdefault(seen, []).append(store)
    widths = {(layer.kv_heads, layer.width) for layer in of_stores}
    if len(widths) > 1 or kinds.keys() == {_ALL}:
        return one
    if beside:
        kinds.setdefault(_ALL, [])
    blocks = -(-context_len // block_size)
    kv_numbers = of_stores[0].kv_numbers

    def size(groups: BlockGroups) -> int:
        slots = max(len(group.stores) for group in groups)
        return (slots * kv_numbers + beside) * blocks_taken(counted(groups, block_size), blocks)

    best = one
    ordered = sorted(kinds.items(), key=lambda kind: kind[0] != _ALL)
    for slots in range(len(of_stores), 0, -1):
        groups = tuple(
            BlockGroup(tuple(own[first : first + slots]), *seen)
            for seen, own in ordered
            for first in range(0, max(len(own), 1), slots)
        )
        if len(groups) <= _TABLES_MOST and size(groups) < size(best):
            best = groups
    return best


def _seen(layers: Sequence[LayerShape]) -> list[_Seen]:
    """What the readers of each store see: all, where they differ."""
    readers: dict[int, set[_Seen]] = {}
    for layer in layers:
        readers.setdefault(layer.store, set()).add((layer.window, layer.chunk))
    return [seen.pop() if len(seen) == 1 else _ALL for _, seen in sorted(readers.items())]


def counted(groups: BlockGroups, block_size: int) -> KvGroups:
    """What a scheduler must know of them."""
    most = [group.blocks_most(block_size) for group in groups]
    return () if most == [None] else tuple((most.count(each), each) for each in dict.fromkeys(most))


def blocks_of_a_pass(groups: BlockGroups, block_size: int, tokens: int) -> int:
    """What a pass over so many tokens takes at most beside that, until it ends: layers with a
    window need all that it writes."""
    return sum(not group.keeps_all for group in groups) * -(-tokens // block_size)
