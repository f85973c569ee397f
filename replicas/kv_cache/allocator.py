"""The blocks of a paged KV cache, and which sequence has which. Knows nothing of their content."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from replicas.cuda.transfers import send
from replicas.kv_cache.host_layout import SCRAP_BLOCK


class OutOfBlocks(Exception):
    """More KV blocks were asked for than are free; the pool's reservation prevents it."""


class BlockAllocator:
    """Which blocks belong to which sequence. One table serves target and draft alike."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = blocks
        # The scrap block is extra; the last freed block is handed out first (it is warm).
        self._free = list(range(blocks, SCRAP_BLOCK, -1))
        self._tables: dict[str, array[int]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, length: int) -> int:
        """Blocks that hold `length` KV positions."""
        return -(-length // self.block_size)

    def grow(self, sequence_id: str, length: int) -> None:
        """Own blocks for `length` positions; raises OutOfBlocks and then changes nothing."""
        table = self._tables.get(sequence_id)
        if table is None:
            table = self._tables[sequence_id] = array("q")
        elif len(table) * self.block_size >= length:
            return
        missing = self.blocks_for(length) - len(table)
        if missing > self.free_blocks:
            if not table:
                del self._tables[sequence_id]
            raise OutOfBlocks(f"{missing} KV blocks wanted, {self.free_blocks} are free")
        for _ in range(missing):
            table.append(self._take())

    def _take(self) -> int:
        """A free block for one owner; there is one."""
        return self._free.pop()

    def release(self, sequence_id: str) -> None:
        """Free all blocks of the sequence; unknown ids are ignored."""
        self._free.extend(reversed(self._tables.pop(sequence_id, array("q"))))

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

    def check_integrity(self) -> None:
        """Every block is free or owned exactly once."""
        owned = [block for table in self._tables.values() for block in table]
        everything = sorted(owned + self._free)
        assert everything == list(range(1, self.blocks + 1)), "a KV block is lost or shared"
