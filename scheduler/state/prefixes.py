"""Which prefixes a replica was given lately, so that a sequence can go where its own is.

Only a guess, and a wrong one costs time alone: what a replica really holds, it looks up by keys of
its own when the sequence comes. Keys here are small and made to be cheap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence as Rows
from zlib import crc32

BlockKey = int
"""Of a full block: a hash over all tokens up to its end, and the salt."""


def block_keys(
    tokens: Rows[int], block_size: int, salt: str, known: tuple[BlockKey, ...] = ()
) -> tuple[BlockKey, ...]:
    """Keys of the full blocks that a sequence of these tokens could take over.

    `known` are those of an earlier content that has only grown since. The last token has no KV yet,
    and the one before it is written anew, so neither is in a block.
    """
    key = known[-1] if known else hash((block_size, crc32(salt.encode()), len(salt)))
    keys = list(known)
    for begin in range(len(keys) * block_size, len(tokens) - 1 - block_size, block_size):
        key = hash((key, tuple(tokens[begin : begin + block_size])))
        keys.append(key)
    return tuple(keys)


class PrefixSet:
    """Keys of a replica's blocks, at most `most` of them; those used last stay."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Rows[BlockKey]) -> None:
        """A sequence with these keys is there now."""
        # The first block becomes the youngest: without it those behind it are of no use.
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def shared(self, keys: Rows[BlockKey]) -> int:
        """How many of the leading blocks are probably there. O(log n)."""
        # No block outlives the one before it, so those that are there come first.
        return bisect_left(range(len(keys)), True, key=lambda at: keys[at] not in self._keys)
