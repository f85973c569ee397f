"""The blocks of a paged KV cache: which sequence has which, and which several sequences share.

A block has as many owners as there are block tables with it. One without owners keeps its content
until its place is needed, if it has a key (see `prefix`): the least recently used goes first, and
of one sequence the last block, for without those before it a block is never found.

Shared blocks are never written. A sequence shares a block only when it will not write there any
more, so the caller of `publish` vouches for that, and `frozen` says from where on a row may write.

Each group of layers (see `groups`) has a table of a sequence. Those of layers with a window slide:
they grow with each pass, and the blocks before the window are given up when it is done, as one
gives up those of a sequence. They are found by their keys as long as they are there. So a row may
begin with a prefix only up to where its last window is there; `found` says how far that is.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch

from replicas.kv_cache.groups import AHEAD, ALL_KEPT, BlockGroups
from replicas.kv_cache.shape import SCRAP_BLOCK
from replicas.transfers import send


class OutOfBlocks(Exception):
    """More KV blocks were asked for than are free; the pool's reservation prevents it."""


def first_table(table: torch.Tensor) -> torch.Tensor:  # [rows, blocks], int64
    """The table of the first group, in whose blocks a drafter's layers lie."""
    return table[:, 0] if table.dim() == 3 else table


class BlockAllocator:
    """Block tables, whose leading blocks may be the same. The first one serves target and draft
    alike. Blocks without owners count as free."""

    def __init__(self, blocks: int, block_size: int, groups: BlockGroups = ALL_KEPT) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self._groups = groups
        self._keeping = [at for at, group in enumerate(groups) if group.keeps_all]
        self._sliding = [at for at, group in enumerate(groups) if not group.keeps_all]
        # The scrap block is extra; the last freed block is handed out first (it is warm).
        self._free = list(range(blocks, SCRAP_BLOCK, -1))
        self._tables: dict[str, list[array[int]]] = {}
        """Of each sequence, by group; the scrap block stands for what was given up."""
        self._begins: dict[str, list[int]] = {}
        """Of each sequence, by group: the blocks before were given up, or never taken."""
        self._owners = [0] * (blocks + 1)
        self._key_of: dict[int, tuple[int, bytes]] = {}
        """Group and key of a block."""
        self._block_of: list[dict[bytes, int]] = [{} for _ in groups]
        self._unowned: OrderedDict[int, None] = OrderedDict()
        """Blocks with a key and without owners, the least recently used first."""
        self._published: dict[str, int] = {}
        """Leading blocks of each sequence that others may have, or have had before it."""

    @property
    def free_blocks(self) -> int:
        return len(self._free) + len(self._unowned)

    def grow(self, sequence_id: str, length: int) -> None:
        """Own blocks for `length` positions, where all are kept; raises OutOfBlocks and then
        changes nothing."""
        self._extend(sequence_id, self._keeping, length)

    def room(self, sequence_id: str) -> int:
        """Positions that its blocks hold, where all are kept."""
        return len(self._tables[sequence_id][0]) * self.block_size

    def reach(self, sequence_id: str, end: int) -> None:
        """Own what a pass up to this position needs of layers with a window; likewise."""
        if self._sliding:
            self._extend(sequence_id, self._sliding, end)

    def slide(self, sequence_id: str, settled: int) -> None:
        """Give up what no query from position `settled` on sees. It is never written again."""
        for at in self._sliding:
            table, begins = self._tables[sequence_id][at], self._begins[sequence_id]
            first = self._groups[at].first_block(settled, self.block_size)
            for index in range(begins[at], first):
                self._give_up(table[index])
                table[index] = SCRAP_BLOCK
            begins[at] = max(begins[at], first)

    def steps_most(self, steps: int, draft_len: int) -> int:
        """Of so many steps of a batch those for which there is room: nothing is given up before the
        last, because all of them are undone where one fails."""
        return min(steps, AHEAD // (draft_len + 1)) if self._sliding else steps

    def _extend(self, sequence_id: str, groups: list[int], length: int) -> None:
        tables, wanted = self._tables.get(sequence_id), -(-length // self.block_size)
        held = [0 if tables is None else len(tables[at]) for at in groups]
        missing = sum(max(wanted - has, 0) for has in held)
        if missing > self.free_blocks:
            raise OutOfBlocks(f"{missing} KV blocks wanted, {self.free_blocks} are free")
        if tables is None:
            tables = self._begin(sequence_id)
        for at, has in zip(groups, held, strict=True):
            for _ in range(wanted - has):
                tables[at].append(self._take())

    def _begin(self, sequence_id: str) -> list[array[int]]:
        self._begins[sequence_id] = [0] * len(self._groups)
        tables = self._tables[sequence_id] = [array("q") for _ in self._groups]
        return tables

    def adopt(self, sequence_id: str, keys: Sequence[bytes]) -> int:
        """Begin the tables of a new sequence with the longest prefix that is here; returns how many
        blocks of tokens that is. `keys` are those of the sequence's leading blocks."""
        assert sequence_id not in self._tables, f"{sequence_id} has blocks already"
        found = self.found(keys)
        if not found:
            return 0
        tables = self._begin(sequence_id)
        for at, (table, group) in enumerate(zip(tables, self._groups, strict=True)):
            first = group.first_block(found * self.block_size, self.block_size)
            table.extend([SCRAP_BLOCK] * first)
            for key in keys[first:found]:
                block = self._block_of[at][key]
                self._own(block)
                table.append(block)
            self._begins[sequence_id][at] = first
        self._published[sequence_id] = found
        return found

    def found(self, keys: Sequence[bytes]) -> int:
        """With how many of its leading blocks of tokens a new sequence can begin: all of them are
        here where all are kept, and of layers with a window those that the next token sees."""
        for at in self._keeping:
            here = self._block_of[at].__contains__
            keys = keys[: sum(1 for _ in takewhile(here, keys))]
        if not self._sliding:
            return len(keys)
        longest, runs = 0, [0] * len(self._groups)
        for end, key in enumerate(keys, 1):
            for at in self._sliding:
                runs[at] = runs[at] + 1 if key in self._block_of[at] else 0
            position = end * self.block_size
            if all(
                end - self._groups[at].first_block(position, self.block_size) <= runs[at]
                for at in self._sliding
            ):
                longest = end
        return longest

    def publish(self, sequence_id: str, keys: Sequence[bytes]) -> None:
        """Let others find the sequence's leading blocks by these keys; it writes there no more.

        Where a block of the same key is there already, that one stays the one to be found.
        """
        done = self._published.get(sequence_id, 0)
        for at, table in enumerate(self._tables[sequence_id]):
            block_of, begin = self._block_of[at], max(done, self._begins[sequence_id][at])
            for block, key in zip(table[begin:], keys[begin:], strict=False):
                if key not in block_of:
                    block_of[key] = block
                    self._key_of[block] = (at, key)
        self._published[sequence_id] = max(done, len(keys))

    def frozen(self, sequence_id: str) -> int:
        """Positions at the row's beginning that it must not write."""
        return self._published.get(sequence_id, 0) * self.block_size

    def release(self, sequence_id: str) -> None:
        """Give up the sequence's blocks; unknown ids are ignored."""
        self._published.pop(sequence_id, None)
        tables, begins = self._tables.pop(sequence_id, ()), self._begins.pop(sequence_id, ())
        for table, begin in zip(tables, begins, strict=True):
            for block in reversed(table[begin:]):
                self._give_up(block)

    def table(
        self, sequence_ids: Sequence[str], device: torch.device
    ) -> torch.Tensor:  # [rows, blocks] or [rows, groups, blocks], int64
        """Block tables of the rows, as wide as the longest, padded with the scrap block; by group
        where there are several."""
        tables = [table for sequence_id in sequence_ids for table in self._tables[sequence_id]]
        width = max(map(len, tables))
        flat = array("q")
        for table in tables:
            flat += table
            flat += array("q", [SCRAP_BLOCK]) * (width - len(table))
        # A view of `flat`, which lives as long as the tensor.
        rows, groups = len(sequence_ids), len(self._groups)
        sizes = (rows, width) if groups == 1 else (rows, groups, width)
        return send(torch.from_numpy(np.frombuffer(flat, np.int64).reshape(sizes)), device)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._unowned.popitem(last=False)
            at, key = self._key_of.pop(block)
            del self._block_of[at][key]
        self._owners[block] = 1
        return block

    def _own(self, block: int) -> None:
        self._unowned.pop(block, None)
        self._owners[block] += 1

    def _give_up(self, block: int) -> None:
        self._owners[block] -= 1
        if self._owners[block]:
            return
        if block in self._key_of:
            self._unowned[block] = None
        else:
            self._free.append(block)

    def check_integrity(self) -> None:
        """Every block is free, or cached, or owned by as many as have it; only a block with a key
        or of one owner is in a table."""
        owners = [0] * (self.blocks + 1)
        for sequence_id, tables in self._tables.items():
            published = self._published.get(sequence_id, 0)
            begins = self._begins[sequence_id]
            owned = [block for at, table in enumerate(tables) for block in table[begins[at] :]]
            assert len(set(owned)) == len(owned), f"{sequence_id}: a block twice in its tables"
            assert published <= max(map(len, tables)), f"{sequence_id}: published"
            for at, table in enumerate(tables):
                assert set(table[: begins[at]]) <= {SCRAP_BLOCK}, f"{sequence_id}: given up"
                for index, block in enumerate(table[begins[at] :], begins[at]):
                    owners[block] += 1
                    assert owners[block] == 1 or block in self._key_of, "shared without a key"
                    shared = index < published
                    keyless = block not in self._key_of
                    assert shared or keyless, f"{sequence_id}: may write a shared one"
                    assert keyless or self._key_of[block][0] == at, "a block of another group"
        assert owners == self._owners, "owners are miscounted"
        found = {
            block: (at, key)
            for at, block_of in enumerate(self._block_of)
            for key, block in block_of.items()
        }
        assert found == self._key_of, "keys differ"
        assert set(self._unowned) == {b for b in self._key_of if not owners[b]}, "unowned blocks"
        in_use = [block for block in range(1, self.blocks + 1) if owners[block]]
        everything = sorted([*in_use, *self._unowned, *self._free])
        assert everything == list(range(1, self.blocks + 1)), "a KV block is lost or doubled"
