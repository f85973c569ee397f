"""Proves that prefill passes cover every row at the least cost, within their bound."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from replicas.prefill import pass_widths


def cost(lengths: list[int], widths: list[int], pass_cost: int) -> int:
    """Tokens computed, padding included, and the passes' own cost."""
    total, done = 0, 0
    for width in widths:
        total += pass_cost + width * sum(length > done for length in lengths)
        done += width
    return total


def test_equal_rows_go_in_one_pass() -> None:
    assert pass_widths([70] * 8, chunk=512, pass_cost=48) == [70]


def test_a_long_row_does_not_pad_the_short_ones() -> None:
    assert pass_widths([16] * 7 + [256], chunk=512, pass_cost=48) == [16, 240]


def test_a_little_padding_is_cheaper_than_another_pass() -> None:
    assert pass_widths([60, 62, 63, 64], chunk=512, pass_cost=48) == [64]


def test_where_a_pass_is_dear_padding_is_cheap() -> None:
    assert pass_widths([16] * 7 + [256], chunk=512, pass_cost=10_000) == [256]


def test_a_gap_wider_than_a_chunk_is_cut() -> None:
    assert pass_widths([1000], chunk=400, pass_cost=48) == [400, 400, 200]


def test_rows_without_tokens_need_no_pass() -> None:
    assert pass_widths([0, 0], chunk=8, pass_cost=48) == []


LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=7)


@given(LENGTHS, st.integers(1, 400), st.integers(0, 200))
def test_passes_reach_the_end_of_the_longest_row(
    lengths: list[int], chunk: int, pass_cost: int
) -> None:
    widths = pass_widths(lengths, chunk, pass_cost)
    assert sum(widths) == max(lengths)
    assert all(1 <= width <= chunk for width in widths)


@given(LENGTHS, st.integers(0, 200))
def test_no_other_choice_of_stops_costs_less(lengths: list[int], pass_cost: int) -> None:
    stops = sorted({length for length in lengths if length})
    if not stops:
        return
    found = cost(lengths, pass_widths(lengths, 1000, pass_cost), pass_cost)
    for n in range(len(stops)):
        for chosen in combinations(stops[:-1], n):
            bounds = [0, *chosen, stops[-1]]
            widths = [b - a for a, b in pairwise(bounds)]
            assert found <= cost(lengths, widths, pass_cost)
