"""The blocks of a paged KV cache: which sequence has which, and which several sequences share.

A block has as many owners as there are block tables with it. One without owners keeps its content
until its place is needed, if it has a key (see `prefix`): the least recently used goes first, and
of one sequence the last block, for without those before it a block is never found.

Shared blocks are never written. A sequence shares a block only when it will not write there any
more, so the caller of `publish` vouches for that, and `frozen` says from where on a row may write.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np
import torch

from replicas.kv_cache.shape import SCRAP_BLOCK
from replicas.transfers import send


class OutOfBlocks(Exception):
    """More KV blocks were asked for than are free; the pool's reservation prevents it."""


class BlockAllocator:
    """Block tables, whose leading blocks may be the same. One table serves target and draft alike.
    Blocks without owners count as free."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = blocks
        # The scrap block is extra; the last freed block is handed out first (it is warm).
        self._free = list(range(blocks, SCRAP_BLOCK, -1))
        self._tables: dict[str, array[int]] = {}
        self._owners = [0] * (blocks + 1)
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._unowned: OrderedDict[int, None] = OrderedDict()
        """Blocks with a key and without owners, the least recently used first."""
        self._published: dict[str, int] = {}
        """Leading blocks of each sequence that others may have, or have had before it."""

    @property
    def free_blocks(self) -> int:
        return len(self._free) + len(self._unowned)

    def grow(self, sequence_id: str, length: int) -> None:
        """Own blocks for `length` positions; raises OutOfBlocks and then changes nothing."""
        table = self._tables.get(sequence_id)
        if table is None:
            table = self._tables[sequence_id] = array("q")
        elif len(table) * self.block_size >= length:
            return
        missing = -(-length // self.block_size) - len(table)
        if missing > self.free_blocks:
            if not table:
                del self._tables[sequence_id]
            raise OutOfBlocks(f"{missing} KV blocks wanted, {self.free_blocks} are free")
        for _ in range(missing):
            table.append(self._take())

    def adopt(self, sequence_id: str, keys: Iterable[bytes]) -> int:
        """Begin the table of a new sequence with the longest chain that is here; returns how many
        blocks that is.

        `keys` are those of the sequence's leading blocks; none behind the first miss is looked up.
        """
        assert sequence_id not in self._tables, f"{sequence_id} has blocks already"
        table = array("q")
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._own(block)
            table.append(block)
        if table:
            self._tables[sequence_id] = table
            self._published[sequence_id] = len(table)
        return len(table)

    def found(self, keys: Iterable[bytes]) -> int:
        """How many of a new sequence's leading blocks are here."""
        return sum(1 for _ in takewhile(self._block_of.__contains__, keys))

    def publish(self, sequence_id: str, keys: Sequence[bytes]) -> None:
        """Let others find the sequence's leading blocks by these keys; it writes there no more.

        Where a block of the same key is there already, that one stays the one to be found.
        """
        table = self._tables[sequence_id]
        done = self._published.get(sequence_id, 0)
        for block, key in zip(table[done:], keys[done:], strict=False):
            if key not in self._block_of:
                self._block_of[key] = block
                self._key_of[block] = key
        self._published[sequence_id] = max(done, len(keys))

    def frozen(self, sequence_id: str) -> int:
        """Positions at the row's beginning that it must not write."""
        return self._published.get(sequence_id, 0) * self.block_size

    def release(self, sequence_id: str) -> None:
        """Give up the sequence's blocks; unknown ids are ignored."""
        self._published.pop(sequence_id, None)
        for block in reversed(self._tables.pop(sequence_id, array("q"))):
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._key_of:
                self._unowned[block] = None
            else:
                self._free.append(block)

    def table(self, sequence_ids: Sequence[str], device: torch.device) -> torch.Tensor:
        """Block tables of the rows, [rows, blocks of the longest], padded with the scrap block."""
        tables = [self._tables[sequence_id] for sequence_id in sequence_ids]
        width = max(map(len, tables))
        flat = array("q")
        for table in tables:
            flat += table
            flat += array("q", [SCRAP_BLOCK]) * (width - len(table))
        # A view of `flat`, which lives as long as the tensor.
        padded = np.frombuffer(flat, np.int64).reshape(len(tables), width)
        return send(torch.from_numpy(padded), device)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._unowned.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._owners[block] = 1
        return block

    def _own(self, block: int) -> None:
        self._unowned.pop(block, None)
        self._owners[block] += 1

    def check_integrity(self) -> None:
        """Every block is free, or cached, or owned by as many as have it; only a block with a key
        or of one owner is in a table."""
        owners = [0] * (self.blocks + 1)
        for sequence_id, table in self._tables.items():
            assert len(set(table)) == len(table), f"{sequence_id}: a block twice in one table"
            assert self._published.get(sequence_id, 0) <= len(table), f"{sequence_id}: published"
            for index, block in enumerate(table):
                owners[block] += 1
                assert owners[block] == 1 or block in self._key_of, "shared without a key"
                shared = index < self._published.get(sequence_id, 0)
                assert shared or block not in self._key_of, f"{sequence_id}: may write a shared one"
        assert owners == self._owners, "owners are miscounted"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "keys differ"
        assert set(self._unowned) == {b for b in self._key_of if not owners[b]}, "unowned blocks"
        owned = [block for block in range(1, self.blocks + 1) if owners[block]]
        everything = sorted([*owned, *self._unowned, *self._free])
        assert everything == list(range(1, self.blocks + 1)), "a KV block is lost or doubled"
