"""Proves that blocks are neither lost nor shared, and that windows are pure index arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replicas.paged_cache import BlockAllocator, OutOfBlocks, PagedCache
from replicas.windows import SCRAP_BLOCK, CacheShape, Layout

CPU = torch.device("cpu")
SHAPE = CacheShape(block_size=4, context_len=64, dtype=torch.float32)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60))
def test_blocks_are_never_lost_or_shared(moves: list[tuple[int, int]]) -> None:
    allocator = BlockAllocator(blocks=20, block_size=4)
    lengths: dict[str, int] = {}
    for which, length in moves:
        name = str(which)
        if length == 0:
            allocator.release(name)
            lengths.pop(name, None)
        else:
            free = allocator.free_blocks
            try:
                allocator.grow(name, length)
                lengths[name] = max(length, lengths.get(name, 0))
            except OutOfBlocks:
                assert allocator.free_blocks == free, "a refused growth changes nothing"
        allocator.check_integrity()
        assert allocator.free_blocks == 20 - sum(-(-n // 4) for n in lengths.values())


def test_tables_are_padded_with_the_scrap_block() -> None:
    allocator = BlockAllocator(blocks=8, block_size=4)
    allocator.grow("long", 9)
    allocator.grow("short", 1)
    table = allocator.table(["short", "long"], CPU)
    assert table.shape == (2, 3)
    assert table[0, 1:].tolist() == [SCRAP_BLOCK, SCRAP_BLOCK]
    assert SCRAP_BLOCK not in table[1].tolist()


def layout(starts: list[int], width: int, lengths: list[int] | None = None) -> Layout:
    allocator = BlockAllocator(blocks=64, block_size=4)
    for i in range(len(starts)):
        allocator.grow(str(i), max(1, (lengths or [s + width for s in starts])[i]))
    return Layout(allocator.table([str(i) for i in range(len(starts))], CPU), starts, width, SHAPE)


def test_a_mask_shows_each_query_its_own_past_and_nothing_else() -> None:
    starts = [3, 9, 5]
    window = layout(starts, 4).window(1, 4)
    assert window.mask is not None
    assert window.length == 9 + 4
    for row, start in enumerate(starts):
        for query in range(3):
            visible = (window.mask[row, 0, query] == 0).nonzero().flatten().tolist()
            assert visible == list(range(start + 1 + query + 1))


def test_a_uniform_group_shares_one_mask_and_needs_none_for_one_token() -> None:
    uniform = layout([7, 7, 7], 3)
    wide = uniform.window(0, 3)
    assert wide.mask is not None
    assert wide.mask.shape[0] == 1
    assert uniform.window(2, 3).mask is None
    assert uniform.window(2, 3).length == 10
    assert layout([7, 6], 3).window(2, 3).mask is not None


def test_padding_is_written_to_the_scrap_block_only() -> None:
    # Row 0 owns 5 positions (2 blocks) and is padded far beyond them; row 1 begins before 0.
    window = layout([3, -1], 16, lengths=[5, 20]).window(0, 16)
    slots = window.slots.view(2, 16)
    owned = 4 * 2
    assert (slots[0, owned - 3 :] < SHAPE.block_size).all()
    assert (slots[0, : owned - 3] >= SHAPE.block_size).all()
    assert slots[1, 0] < SHAPE.block_size
    assert (slots[1, 1:] >= SHAPE.block_size).all()
    assert window.positions.min() == 0
    assert layout([60], 8).window(0, 8).positions.max() == SHAPE.context_len - 1


@given(
    st.lists(st.lists(st.integers(-1, 50), min_size=1, max_size=4), min_size=2, max_size=4),
    st.integers(1, 6),
)
def test_a_part_of_a_window_is_that_of_its_rows_alone(parts: list[list[int]], width: int) -> None:
    """Blocks, length and mask; also with rows that begin before 0 or are padded beyond blocks. Rows
    that begin alike are one."""
    starts = [start for part in parts for start in part]
    allocator = BlockAllocator(blocks=400, block_size=4)
    ids = [str(i) for i in range(len(starts))]
    for name, start in zip(ids, starts, strict=True):
        allocator.grow(name, start + 3)
    table = allocator.table(ids, CPU)
    divided = Layout(table, starts, width, SHAPE, parts=[len(part) for part in parts])
    for begin, end in ((0, width), (width - 1, width)):
        window = divided.window(begin, end)
        assert len(window.parts) == (0 if len(set(starts)) == 1 else len(parts))
        first = 0
        for part, rows in zip(window.parts, parts if window.parts else [], strict=True):
            after = first + len(rows)
            alone = Layout(table[first:after], rows, width, SHAPE).window(begin, end)
            assert (part.rows, part.width, part.length) == (len(rows), end - begin, alone.length)
            assert torch.equal(part.blocks, alone.blocks)
            assert part.mask is not None
            hidden = torch.zeros(()) if alone.mask is None else alone.mask
            assert torch.equal(part.mask, hidden.expand_as(part.mask))
            first = after


def test_rows_of_any_length_read_back_what_was_written() -> None:
    """I1 and I2: what a row reads is its own content at its own positions, however ragged."""
    torch.manual_seed(0)
    cache = PagedCache(1, 2, 3, blocks=64, block_size=4, dtype=torch.float32, device=CPU)
    allocator = BlockAllocator(blocks=64, block_size=4)
    lengths = [5, 12, 8]
    ids = [str(i) for i in range(3)]
    for name, length in zip(ids, lengths, strict=True):
        allocator.grow(name, length + 2)
    table = allocator.table(ids, CPU)
    written = torch.randn(3, 2, 14, 3)
    for position in range(12):
        window = Layout(table, [position] * 3, 1, SHAPE).window(0, 1)
        cache.enter(window)
        piece = written[:, :, position : position + 1]
        cache.update(piece, -piece, 0)
    window = Layout(table, lengths, 2, SHAPE).window(0, 2)
    cache.enter(window)
    fresh = torch.randn(3, 2, 2, 3)
    keys, values = cache.update(fresh, -fresh, 0)
    assert keys.shape == (3, 2, 14, 3)
    for row, length in enumerate(lengths):
        assert torch.equal(keys[row, :, :length], written[row, :, :length])
        assert torch.equal(keys[row, :, length : length + 2], fresh[row])
        assert torch.equal(values[row, :, : length + 2], -keys[row, :, : length + 2])


def test_growth_beyond_the_free_blocks_is_refused_with_both_numbers() -> None:
    allocator = BlockAllocator(blocks=2, block_size=4)
    with pytest.raises(OutOfBlocks, match="3 KV blocks wanted, 2 are free"):
        allocator.grow("a", 12)
    allocator.check_integrity()
