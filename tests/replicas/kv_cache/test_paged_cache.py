"""Proves that blocks are neither lost nor shared, and that layouts are pure index arithmetic, on
the host as on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from replicas.invariant.layout import PassLayout, StepLayout, ranges_layout
from replicas.invariant.ops import Arithmetic
from replicas.kv_cache import SCRAP_BLOCK, BlockAllocator, CacheShape, OutOfBlocks, PagedCache
from replicas.kv_cache.device_layout import DeviceStepLayout, device_ranges

CPU = torch.device("cpu")
SHAPE = CacheShape(block_size=4, context_len=64, heads=2, kv_heads=2, head_dim=3)
AS_IT_IS = Arithmetic()


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


def table_of(lengths: list[int]) -> torch.Tensor:
    allocator = BlockAllocator(blocks=400, block_size=4)
    for index, length in enumerate(lengths):
        allocator.grow(str(index), length)
    return allocator.table([str(index) for index in range(len(lengths))], CPU)


def flat_slots(layout: PassLayout) -> list[int]:
    block, offset = layout.slots
    return (block * SHAPE.block_size + offset).tolist()


def seen_by(layout: PassLayout) -> dict[int, list[int]]:
    """The positions that each query sees, by its place in the pass."""
    seen = {}
    for group in layout.groups:
        for places, hidden in zip(group.tokens, group.hidden, strict=True):
            for place, mask in zip(places, hidden, strict=True):
                beyond = [group.seen + at for at, one in enumerate(mask) if one == 0]
                seen[int(place)] = [*range(group.seen), *beyond]
    return seen


@given(st.lists(st.integers(-1, 50), min_size=1, max_size=8), st.integers(1, 20))
def test_each_query_sees_its_own_past_and_is_written_into_its_own_row(
    starts: list[int], width: int
) -> None:
    """Where a query lies before its row, it sees one position; what lies outside of a row goes to
    the scrap block."""
    lengths = [max(start, 0) + 1 for start in starts]
    table = table_of(lengths)
    layout = StepLayout(table, starts, width, SHAPE, AS_IT_IS).window(0, width)
    device = DeviceStepLayout(table, starts, width, SHAPE).window(0, width)
    seen, slots = seen_by(layout), flat_slots(layout)
    assert slots == device.slots.tolist()
    assert torch.equal(layout.positions, device.positions)
    assert max(layout.positions) < SHAPE.context_len
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        owned = range(-(-length // SHAPE.block_size) * SHAPE.block_size)
        for column in range(width):
            at, position = row * width + column, start + column
            assert seen[at] == list(range(max(position, 0) + 1))
            block, place = divmod(slots[at], SHAPE.block_size)
            assert (block != SCRAP_BLOCK) == (position in owned)
            if position in owned:
                assert block == table[row, position // SHAPE.block_size]
                assert place == position % SHAPE.block_size


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 34)), min_size=1, max_size=6))
def test_ranges_are_windows_of_rows_with_widths_of_their_own(parts: list[tuple[int, int]]) -> None:
    ranges = [(begin, begin + width) for begin, width in parts]
    table = table_of([end for _, end in ranges])
    host, device = (
        ranges_layout(table, ranges, SHAPE, AS_IT_IS),
        device_ranges(table, ranges, SHAPE),
    )
    positions = [position for begin, end in ranges for position in range(begin, end)]
    assert host.positions.tolist() == device.positions.tolist() == positions
    assert flat_slots(host) == device.slots.tolist()
    assert seen_by(host) == {at: list(range(one + 1)) for at, one in enumerate(positions)}


@pytest.mark.parametrize("by_head", [True, False])
def test_rows_of_any_length_read_back_what_was_written(by_head: bool) -> None:
    torch.manual_seed(0)
    cache = PagedCache(SHAPE, 1, 64, torch.float32, CPU, by_head)
    lengths = [5, 12, 8]
    table = table_of([length + 2 for length in lengths])
    ranges = [(0, length) for length in lengths]
    layout: Any
    layout = ranges_layout(table, ranges, SHAPE, AS_IT_IS)
    if not by_head:
        layout = device_ranges(table, ranges, SHAPE)
    fresh = torch.randn(sum(lengths), 2, 2, 3)
    cache.write(0, layout.slots, fresh.clone())
    keys, values = cache.layers[0].unbind(2)
    for row, rows in enumerate(fresh.split(lengths)):
        for store, expected in zip((keys, values), rows.unbind(1), strict=True):
            read = store[table[row]].flatten(0, 1)[: lengths[row]]
            assert torch.equal(read, expected)
