"""Proves that blocks are neither lost nor shared, and that layouts are pure index arithmetic, on
the host as on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from replicas.invariant.layout import PassLayout, StepLayout, ranges_layout
from replicas.invariant.ops import Arithmetic
from replicas.kv_cache import (
    SCRAP_BLOCK,
    BlockAllocator,
    CacheShape,
    OutOfBlocks,
    PagedCache,
    divided_into_passes,
)
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
                beyond = [group.seen + at for at, line in enumerate(mask) if line == 0]
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
    assert seen_by(host) == {at: list(range(position + 1)) for at, position in enumerate(positions)}


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


def test_a_pass_over_ranges_is_as_wide_as_the_longest_of_them() -> None:
    layout = device_ranges(table_of([9, 4]), [(5, 9), (3, 4)], SHAPE)
    assert (layout.width, layout.tokens) == (4, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gather_by_head_has_each_rows_blocks_in_the_order_that_attention_reads(
    dtype: torch.dtype,
) -> None:
    """Row, KV head, keys or values, block."""
    torch.manual_seed(1)
    cache = PagedCache(SHAPE, 2, 30, dtype, CPU, by_head=True)
    table = table_of([9, 4, 15])
    ranges = [(0, 9), (0, 4), (2, 15)]
    layout = ranges_layout(table, ranges, SHAPE, AS_IT_IS)
    cache.write(1, layout.slots, torch.randn(26, 2, 2, 3).to(dtype))
    runs = cache.runs(table.numpy(), SHAPE.kv_heads)
    assert len(runs) == 3 * 2 * 2 * table.shape[1]
    out = cache.room(len(runs), 12)
    cache.gather(1, runs, out)
    expected = cache.layers[1][table].permute(0, 4, 3, 1, 2, 5)
    assert torch.equal(out.view(expected.shape), expected)
    assert expected.any()
    cache.gather(0, runs, out)
    assert not out.any(), "another layer"


def test_the_standing_buffer_grows_as_needed_and_serves_smaller_passes() -> None:
    cache = PagedCache(SHAPE, 1, 8, torch.float32, CPU, by_head=True)
    small, large = cache.room(3, 12), cache.room(10, 12)
    assert (small.shape, large.shape) == ((3, 12), (10, 12))
    assert cache.room(10, 12).data_ptr() == cache.room(4, 12).data_ptr() == large.data_ptr()
    assert cache.room(4, 12).shape == (4, 12)


@pytest.mark.parametrize("by_head", [True, False])
def test_what_is_stored_is_finite_where_the_dtype_overflows_and_can_be_cleared(
    by_head: bool,
) -> None:
    table = table_of([2])
    host = ranges_layout(table, [(0, 2)], SHAPE, AS_IT_IS)
    device = device_ranges(table, [(0, 2)], SHAPE)
    fresh = torch.ones(2, 2, 2, 3)
    fresh[0, 0, 0, 0], fresh[1, 1, 1, 1] = torch.inf, torch.nan
    for dtype in (torch.float16, torch.float32):
        cache = PagedCache(SHAPE, 1, 8, dtype, CPU, by_head)
        cache.write(0, host.slots if by_head else device.slots, fresh.to(dtype))
        finite = bool(cache.layers[0].isfinite().all())
        assert finite == (dtype is torch.float16)
        assert cache.layers[0].shape == (9, 4, 2, 2, 3)
        cache.clear()
        assert not cache.layers[0].any()


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5),
    st.sampled_from([1, 4, 7]),
)
def test_a_device_computes_whole_tiles_and_its_padding_goes_to_the_scrap_block(
    parts: list[tuple[int, int]], tile: int
) -> None:
    shape = CacheShape(4, 64, 2, 2, 3, tile=tile)
    ranges = [(begin, begin + width) for begin, width in parts]
    window = device_ranges(table_of([end for _, end in ranges]), ranges, shape)
    tokens = sum(width for _, width in parts)
    assert window.tokens == tokens
    assert window.padded % tile == 0
    assert tokens <= window.padded < tokens + tile
    assert len(window.slots) == len(window.positions) == window.padded
    assert window.slots[tokens:].tolist() == [0] * (window.padded - tokens)
    assert window.positions[tokens:].tolist() == [0] * (window.padded - tokens)
    first, counts = window.runs
    assert counts.tolist() == [width for _, width in parts]
    assert first.tolist() == [sum(w for _, w in parts[:row]) for row in range(len(parts))]
    assert window.reach >= max(end for _, end in ranges)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.integers(1, 6), st.data())
def test_a_window_of_a_step_is_a_part_of_its_grid(
    starts: list[int], width: int, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, width - 1))
    end = data.draw(st.integers(begin + 1, width))
    layout = DeviceStepLayout(table_of([start + width for start in starts]), starts, width, SHAPE)
    assert layout.positions.tolist() == [list(range(start, start + width)) for start in starts]
    window = layout.window(begin, end)
    assert window.grid.tolist() == [list(range(start + begin, start + end)) for start in starts]
    assert (window.width, window.tokens) == (end - begin, len(starts) * (end - begin))
    first, counts = window.runs
    assert first.tolist() == [row * (end - begin) for row in range(len(starts))]
    assert counts.tolist() == [end - begin] * len(starts)
    assert window.reach == max(starts) + width


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=6), st.integers(1, 12))
def test_passes_hold_all_tokens_in_order_and_all_but_the_last_are_full(
    parts: list[tuple[int, int]], most: int
) -> None:
    ranges = [(begin, begin + width) for begin, width in parts]
    found = list(divided_into_passes(ranges, most))
    tokens = [[(row, at) for row, (begin, end) in key for at in range(begin, end)] for key in found]
    wanted = [(row, at) for row, (begin, end) in enumerate(ranges) for at in range(begin, end)]
    assert [place for part in tokens for place in part] == wanted
    assert all(len(part) == most for part in tokens[:-1])
    assert all(0 < len(part) <= most for part in tokens)
    assert all(len({row for row, _ in key}) == len(key) for key in found), "a row once in each"


def test_the_block_used_last_is_given_up_last_and_a_chain_from_its_end() -> None:
    allocator = BlockAllocator(blocks=6, block_size=4)
    keys = {name: [f"{name}{index}".encode() for index in range(2)] for name in "abc"}
    for name in "abc":
        allocator.grow(name, 8)
        allocator.publish(name, keys[name])
        assert allocator.frozen(name) == 8
        allocator.release(name)
        allocator.check_integrity()
    assert allocator.free_blocks == 6
    assert [allocator.found(keys[name]) for name in "abc"] == [2, 2, 2]
    assert allocator.adopt("again", keys["a"]) == 2
    assert allocator.free_blocks == 4
    allocator.release("again")
    allocator.grow("new", 4)
    assert [allocator.found(keys[name]) for name in "abc"] == [2, 1, 2], "b is the oldest now"
    assert allocator.frozen("new") == 0
    allocator.grow("new", 12)
    assert [allocator.found(keys[name]) for name in "abc"] == [2, 0, 1]
    with pytest.raises(OutOfBlocks, match="5 KV blocks wanted, 3 are free"):
        allocator.grow("more", 20)
    allocator.check_integrity()


def test_of_two_blocks_with_one_key_the_first_stays_the_one_to_be_found() -> None:
    allocator = BlockAllocator(blocks=6, block_size=4)
    for name in ("one", "two"):
        allocator.grow(name, 8)
    allocator.publish("one", [b"k"])
    allocator.publish("two", [b"k", b"l"])
    assert (allocator.frozen("one"), allocator.frozen("two")) == (4, 8)
    assert allocator.adopt("three", [b"k", b"l", b"m"]) == 2
    table = allocator.table(["one", "two", "three"], CPU).tolist()
    assert table[2] == [table[0][0], table[1][1]]
    for name in ("one", "three", "two"):
        allocator.release(name)
        allocator.check_integrity()
    assert allocator.free_blocks == 6
