"""Proves that parts hold all rows, pay for themselves, and are not divided further for a loss."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replicas.parts import coarser, part_rows, positions_in_place, positions_read

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=24)


@given(LENGTHS, st.integers(0, 200), st.booleans())
def test_each_part_saves_more_than_it_costs_and_no_further_one_would(
    lengths: list[int], cost: int, rising: bool
) -> None:
    lengths = sorted(lengths) if rising else lengths
    parts = part_rows(lengths, cost)
    read = positions_read(lengths, parts)
    whole = max(lengths) * len(lengths)
    assert sum(lengths) <= read <= whole
    if not parts:
        assert read == whole
    else:
        assert min(parts) > 0
        assert sum(parts) == len(lengths)
        assert read + cost * (len(parts) - 1) < whole
    begin = 0
    for rows in parts or [len(lengths)]:
        part = lengths[begin : begin + rows]
        begin += rows
        for at in range(1, rows):
            assert max(part) * rows - positions_read(part, [at, rows - at]) <= cost


@given(LENGTHS, st.integers(0, 100), st.integers(0, 300))
def test_coarser_parts_hold_the_same_rows_and_read_little_more(
    lengths: list[int], cost: int, further: int
) -> None:
    lengths = sorted(lengths)
    parts = part_rows(lengths, cost)
    merged = coarser(lengths, parts, further)
    ends = {sum(parts[:n]) for n in range(len(parts) + 1)}
    assert {sum(merged[:n]) for n in range(len(merged) + 1)} <= ends
    assert sum(merged or [len(lengths)]) == len(lengths)
    spared = max(len(parts), 1) - max(len(merged), 1)
    assert positions_read(lengths, merged) <= positions_read(lengths, parts) + spared * further
    assert coarser(lengths, parts, 10**6) == []
    assert coarser(lengths, parts, None) == []


def test_positions_are_counted_part_by_part() -> None:
    lengths = [16, 20, 24, 180, 200]
    assert positions_read(lengths, []) == 1000
    assert positions_read(lengths, [3, 2]) == 3 * 24 + 2 * 200
    assert part_rows(lengths, 50) == [3, 2]
    assert part_rows(lengths, 10) == [3, 1, 1]
    assert part_rows(lengths, 528) == []
    assert part_rows(lengths, None) == []
    assert part_rows([90] * 8, 0) == []
    assert positions_in_place(lengths, 1) == sum(lengths)
    assert positions_in_place(lengths, 16) == 16 + 32 + 32 + 192 + 208
