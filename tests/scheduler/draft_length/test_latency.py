"""Proves that a latency table comes to the times that lie behind what a replica reports: straight
or in steps, with noise and outliers, on a machine whose speed changes."""

from __future__ import annotations

import math
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, strategies as st

from scheduler.draft_length.latency import CELLS_MAX, Latencies, LatencyTable, bucket

DRAFT_S = 1e-3


def line(tokens: int, kv: int) -> float:
    return 10e-3 + 3e-4 * tokens + 1e-7 * kv


def tiles(tokens: int, kv: int) -> float:
    """Whole tiles of 32 tokens."""
    return 4e-3 + 4e-3 * math.ceil(tokens / 32) + 1e-7 * kv


def see(table: LatencyTable, rows: int, draft_len: int, kv: int, factor: float = 1.0) -> None:
    tokens = rows * (draft_len + 1)
    table.observe_step(rows, draft_len, kv, factor * draft_len * DRAFT_S, factor * line(tokens, kv))


def test_buckets_end_where_tiles_do() -> None:
    assert [bucket(tokens) for tokens in range(1, 17)] == list(range(16))
    for tokens in range(1, 2000):
        assert bucket(tokens) <= bucket(tokens + 1) <= bucket(tokens) + 1
    for tile in (16, 32, 48, 64, 96, 128, 256):
        assert bucket(tile) < bucket(tile + 1)


@pytest.mark.parametrize("truth", [line, tiles])
def test_what_was_seen_is_known_between_it_and_beyond(truth: object) -> None:
    rng, found = Random(1), Latencies()
    for now in range(600):
        tokens, kv = rng.choice([1, 8, 16, 32, 40, 64]), rng.choice([500, 4000, 30_000])
        outlier = 20.0 if rng.random() < 0.02 else 1.0
        found.observe(tokens, kv, truth(tokens, kv) * rng.uniform(0.9, 1.1) * outlier, now)
    for tokens in (1, 16, 32, 40, 64):
        assert found(tokens, 4000) == pytest.approx(truth(tokens, 4000), rel=0.1)
        assert found(tokens, 100_000) == pytest.approx(truth(tokens, 100_000), rel=0.2)
    if truth is line:
        for tokens in (3, 24, 52, 100):
            assert found(tokens, 4000) == pytest.approx(line(tokens, 4000), rel=0.1)


SEEN = st.lists(
    st.tuples(st.integers(1, 600), st.integers(0, 10**6), st.floats(1e-9, 1e3)),
    min_size=1,
    max_size=80,
)


@given(SEEN)
def test_whatever_is_seen_times_are_finite_and_rise_with_tokens(
    seen: list[tuple[int, int, float]],
) -> None:
    found = Latencies()
    assert found(5, 5) == 0.0
    for now, (tokens, kv, seconds) in enumerate(seen):
        found.observe(tokens, kv, seconds, now)
    times = [found(tokens, 100) for tokens in range(0, 1300, 13)]
    assert all(0.0 < one < math.inf for one in times[1:])
    assert all(one <= two * (1 + 1e-9) for one, two in pairwise(times))


def test_memory_is_bounded() -> None:
    found = Latencies()
    for now in range(3000):
        found.observe(int(16 * 2 ** (now % 200 / 8)), 0, 1e-3, now)
    assert len(found) == CELLS_MAX


def calibrated() -> LatencyTable:
    table = LatencyTable()
    for rows, k, _ in product((1, 8), (0, 4), range(3)):
        see(table, rows, k, 64 * rows)
    return table


def test_a_calibration_is_enough_to_know_what_steps_take_and_what_took_no_time_is_none() -> None:
    idle = LatencyTable()
    idle.observe_step(8, 4, 800, 0.0, 0.0)
    idle.observe_prefill(40, 0, 0.0)
    assert (idle.known, len(idle.step), len(idle.prefill)) == (False, 0, 0)
    table = calibrated()
    assert table.known
    assert table.step_s(8, 2, 512) == pytest.approx(line(24, 512) + 2 * DRAFT_S, rel=0.05)
    assert table.steps_s(8, 4, 512) == [table.step_s(8, k, 512) for k in range(5)]


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_a_machine_whose_speed_changes_makes_no_work_dearer_than_other_work(factor: float) -> None:
    """Only k = 2 goes on being seen; what the others take is known from it."""
    table = calibrated()
    for _ in range(20):
        for draft_len in (0, 1, 2, 4):
            see(table, 8, draft_len, 2000)
    for _ in range(100):
        see(table, 8, 2, 2000, factor)
    for draft_len in (0, 1, 2, 4):
        truth = line(8 * (draft_len + 1), 2000) + draft_len * DRAFT_S
        assert table.step_s(8, draft_len, 2000) == pytest.approx(factor * truth, rel=0.15)


def test_one_slow_step_moves_it_little() -> None:
    table = calibrated()
    for _ in range(50):
        see(table, 8, 2, 2000)
    before_s = table.step_s(8, 2, 2000)
    see(table, 8, 2, 2000, factor=100.0)
    assert table.step_s(8, 2, 2000) == pytest.approx(before_s, rel=0.1)


def test_a_prefill_takes_what_it_fills_and_what_was_filled_before() -> None:
    def truth(tokens: int, begin: int) -> float:
        return 2e-3 + 1e-4 * tokens + 1e-7 * tokens * begin

    table = LatencyTable()
    for tokens in (16, 64, 256):
        table.observe_prefill(tokens, 0, truth(tokens, 0))
    assert table.prefill_s(160, 0) == pytest.approx(truth(160, 0), rel=0.02)
    for begin in (4000, 20_000, 9000):
        table.observe_prefill(256, 256 * begin, truth(256, begin))
    assert table.prefill_s(200, 10_000) == pytest.approx(truth(200, 10_000), rel=0.05)
