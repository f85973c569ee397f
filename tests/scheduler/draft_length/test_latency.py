"""Proves that a latency table comes to the times that lie behind what a replica reports: straight
or in steps, with noise and outliers, on a machine whose speed changes."""

from __future__ import annotations

import math
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, strategies as st

from scheduler.draft_length.latency import (
    CELLS_MAX,
    COUNT_MAX,
    FIT_EVERY,
    STALE,
    Latencies,
    LatencyTable,
    bucket,
)

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
    assert all(0.0 < seconds < math.inf for seconds in times[1:])
    assert all(before <= after * (1 + 1e-9) for before, after in pairwise(times))


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
    idle.observe_prefill(0, 0, 1.0)
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


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_one_step_of_another_time_moves_it_little(factor: float) -> None:
    table = calibrated()
    for _ in range(50):
        see(table, 8, 2, 2000)
    before_s = table.step_s(8, 2, 2000)
    see(table, 8, 2, 2000, factor)
    assert table.step_s(8, 2, 2000) == pytest.approx(before_s, rel=0.06)


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


def seen(*points: tuple[int, int, float]) -> Latencies:
    """That saw (tokens, KV positions, seconds) in this order."""
    found = Latencies()
    for now, point in enumerate(points):
        found.observe(*point, now)
    return found


def test_the_first_time_of_a_kind_is_forgotten_at_the_second_and_then_all_count_alike() -> None:
    assert seen((8, 0, 1.0)).usual_s(8, 0) == pytest.approx(1.0)
    assert seen((8, 0, 1.0), (8, 0, 0.4)).usual_s(8, 0) == pytest.approx(0.4)
    times = (1.0, 0.4, 0.5, 0.6)
    assert seen(*((8, 0, seconds) for seconds in times)).usual_s(8, 0) == pytest.approx(0.5)
    assert seen(*((8, 0, seconds) for seconds in times[:2]))(8, 0) == pytest.approx(0.4)
    assert seen(*[(8, 0, 1.0)] * 20, (8, 0, 99.0)).usual_s(8, 0) == pytest.approx(1 + 0.5 / 20)
    assert seen((8, 0, 1.0)).usual_s(9, 0) is None
    assert seen((8, 0, 1.0)).usual_s(8, 1) is None, "another bucket of KV positions"


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.floats(1.0, 3.0))
def test_times_lie_on_the_line_between_two_points_and_beyond_never_below_their_share(
    first_s: float, rise: float, share: float
) -> None:
    few, many = (16, first_s), (64, first_s * (1 + rise))
    found = seen(*((tokens, 0, seconds) for tokens, seconds in (few, few, many, many)))
    slope = (many[1] - few[1]) / 48
    for tokens in (16, 20, 40, 64, 64 * share):
        assert found(tokens, 0) == pytest.approx(few[1] + slope * (tokens - 16))
    for tokens in (1, 5, 15):
        line_s = few[1] + slope * (tokens - 16)
        assert found(tokens, 0) == pytest.approx(max(line_s, few[1] * tokens / 16))
    alone = seen((16, 0, first_s))
    assert alone(64, 0) == alone(4, 0) == pytest.approx(first_s), "one point has no slope"


@given(st.floats(1e-9, 1e-5), st.floats(1e-3, 1.0))
def test_what_a_kv_position_costs_is_found_where_it_alone_differs(
    kv_s: float, base_s: float
) -> None:
    points = [(8, kv, base_s + kv_s * kv) for kv in (100, 300, 900, 120, 450, 800, 110, 500, 999)]
    assert seen(*points[:3]).kv_s == pytest.approx(kv_s, rel=1e-6)
    found = seen(*points)
    assert found.kv_s == pytest.approx(kv_s, rel=1e-6)
    assert found(8, 5000) == pytest.approx(base_s + 5000 * kv_s)
    assert found.usual_s(8, 200) is None
    assert found.usual_s(8, 64) == pytest.approx(base_s + 64 * kv_s)
    assert found.usual_s(8, 290) == pytest.approx(base_s + 290 * kv_s)
    falls = seen(*((8, kv, base_s / kv) for kv in (100, 300, 900)))
    assert falls.kv_s == 0.0, "reading more takes no less"


def test_of_what_kv_positions_cost_an_error_counts_by_its_share_of_the_time() -> None:
    """Work that takes twice as long weighs a quarter. What takes no time tells nothing."""
    short = ((8, 100, 1.0 - 0.01), (8, 200, 1.0), (8, 300, 1.0 + 0.01))
    long = ((64, 100, 2.0 - 0.06), (64, 300, 2.0 + 0.06))
    nothing = ((4, 100, 0.0), (4, 300, 0.0))
    assert seen(*short).kv_s == pytest.approx(1e-4)
    assert seen(*long).kv_s == pytest.approx(6e-4)
    assert seen(*short, *long, *nothing).kv_s == pytest.approx((4 * 1e-4 + 6e-4) / 5)
    assert seen(*nothing)(4, 200) == 0.0


def test_of_the_kv_positions_of_a_bucket_the_fewest_take_half_the_time_at_least() -> None:
    """Also where other work of as many tokens says that each costs more."""
    steep = seen((8, 127, 1.0), (8, 1000, 900.0), (8, 2000, 2000.0))
    assert steep.usual_s(8, 64) == pytest.approx(0.5)


def test_the_tokens_and_the_times_of_a_bucket_are_means_of_what_was_seen() -> None:
    """So a bucket lies on the line on which they lie."""
    wide = (33, 33, *(36, 34, 35, 33) * (FIT_EVERY // 4))
    assert len({bucket(tokens) for tokens in wide}) == 1
    found = seen(*((tokens, 0, 1.0 + 0.1 * tokens) for tokens in (8, 8, *wide)))
    for tokens in (8, 20, 33, 36, 50):
        assert found(tokens, 0) == pytest.approx(1.0 + 0.1 * tokens)


def test_beyond_what_was_seen_times_rise_as_they_do_on_the_whole() -> None:
    found = seen((4, 0, 0.1), (8, 0, 0.1), (12, 0, 0.3))
    assert found(16, 0) == pytest.approx(0.3 + 4 * 0.2 / 8)


def test_of_buckets_with_the_same_tokens_none_weighs_more_because_it_is_seen_always() -> None:
    def base_s(times: int) -> float:
        return seen((8, 1, 1.0), *[(8, 0, 3.0)] * times, (9, 0, 9.0))(8, 0)

    assert base_s(COUNT_MAX + 50) == base_s(COUNT_MAX)
    assert base_s(1) == pytest.approx(2.0)
    assert base_s(3) == pytest.approx((1.0 + 3 * 3.0) / 4)


def test_what_is_seen_again_and_again_is_interpolated_anew_now_and_then() -> None:
    """For each time it would cost more than it tells."""
    assert seen(*[(8, 0, 1.0)] * 2, *[(8, 0, 1.1)] * (FIT_EVERY - 1))(8, 0) == 1.0
    found = seen(*[(8, 0, 1.0)] * 2, *[(8, 0, 1.1)] * FIT_EVERY)
    assert found(8, 0) == found.usual_s(8, 0)
    assert found(8, 0) > 1.05


def test_fewer_tokens_take_no_longer_than_more() -> None:
    found = seen((4, 0, 0.3), (8, 0, 0.1), (12, 0, 0.2))
    assert [found(tokens, 0) for tokens in (4, 8, 12)] == pytest.approx([0.1, 0.1, 0.2])


def test_work_is_stale_once_it_was_not_seen_for_long() -> None:
    found = seen((8, 0, 1.0))
    assert not found.stale(8, STALE - 1)
    assert found.stale(8, STALE)
    assert found.stale(9, 0), "never seen"
    found.observe(8, 5, 1.0, 40)
    assert not found.stale(8, 40 + STALE - 1), "whatever it reads"
    table = LatencyTable()
    assert table.stale(2, 3)
    see(table, 2, 3, 100)
    assert not table.stale(2, 3)
    assert table.stale(2, 1)
    assert not table.stale(8, 0), "so many tokens were seen"
    for more in range(1, STALE + 1):
        assert not table.stale(2, 3)
        if more % 2:
            table.observe_prefill(1, 0, 1e-3)
        else:
            see(table, 1, 0, 100)
    assert table.stale(2, 3), "other work counts as time that passes"


def test_what_was_seen_longest_ago_is_forgotten_first() -> None:
    found = Latencies()
    for now in range(CELLS_MAX):
        found.observe(1 << (now % 10), 1 << (now // 10), 1.0, now)
    found.observe(1, 1, 1.0, CELLS_MAX)  # the oldest is seen again
    found.observe(5000, 0, 1.0, CELLS_MAX + 1)
    assert found.usual_s(1, 1) is not None
    assert found.usual_s(2, 1) is None
    assert found.usual_s(4, 1) is not None


@pytest.mark.parametrize("factor", [0.8, 1.25])
@pytest.mark.parametrize("draft_len", [0, 2])
def test_the_factor_of_speed_comes_to_seconds_now_over_usual_seconds(
    factor: float, draft_len: int
) -> None:
    table = LatencyTable()
    for _ in range(40):
        see(table, 8, draft_len, 2000)
        table.observe_prefill(64, 0, 0.1)
    assert table.slowdown == pytest.approx(1.0, abs=0.02)
    for _ in range(6):
        see(table, 8, draft_len, 2000, factor)
    steps = table.slowdown
    assert min(1.0, factor) < steps < max(1.0, factor), "little by little"
    for _ in range(6):
        table.observe_prefill(64, 0, factor * 0.1)
    assert abs(table.slowdown - factor) < abs(steps - factor), "prefills show it, too"
    assert table.prefill_s(64, 0) == pytest.approx(factor * 0.1, rel=0.1)
    table.observe_prefill(512, 0, 0.7)
    assert table.prefill_s(512, 0) == pytest.approx(0.7), "a new size, at today's speed"
    see(table, 16, 3, 4000, factor)
    new_s = factor * (line(64, 4000) + 3 * DRAFT_S)
    assert table.step_s(16, 3, 4000) == pytest.approx(new_s), "new rows, too"
    assert table.step_s(8, draft_len, 2000) == pytest.approx(
        factor * (line(8 * (draft_len + 1), 2000) + draft_len * DRAFT_S), rel=0.1
    )
