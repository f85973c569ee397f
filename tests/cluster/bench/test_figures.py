"""Proves the arithmetic of a benchmark by values computed by hand."""

from __future__ import annotations

import pytest

from cluster.bench.figures import Distribution, Record, summarise, timeline


def test_a_distribution_needs_no_batch() -> None:
    made = Distribution.of([3.0, 1.0, 2.0])
    assert (made.count, made.mean, made.p50, made.max) == (3, 2.0, 2.0, 3.0)
    assert made.p90 == pytest.approx(2.8)
    assert Distribution.of([]) is None


def served() -> list[Record]:
    """Two that were served, one late by the driver's fault, and one that failed."""
    return [
        Record(0, 0.0, 0.0, 10, [(0.5, 1), (1.0, 4), (1.5, 3)], 1.5, "", 4, 16, 6, (3, 2, 1, 0)),
        Record(1, 1.0, 1.5, 20, [(3.0, 2), (4.0, 2)], 4.0, "", 2, 4, 2, (2,), 1, 16),
        Record(2, 2.0, 2.0, 0, [(2.5, 1)], 3.0, "UNAVAILABLE"),
    ]


def test_the_figures_of_a_run() -> None:
    """Latencies count from the intended arrival; a request that failed counts as failed only."""
    made = summarise(served(), retries=3)
    assert (made.requests, made.failed, made.errors) == (3, 1, {"UNAVAILABLE": 1})
    assert (made.prompt_tokens, made.new_tokens, made.elapsed_s) == (30, 12, 4.0)
    assert (made.tokens_per_s, made.requests_per_s) == (3.0, 0.5)
    assert (made.retries, made.recovered, made.cached_tokens) == (3, 1, 16)
    assert (made.latency_s.mean, made.latency_s.max, made.late_s.max) == (2.25, 3.0, 0.5)
    assert (made.ttft_s.mean, made.ttft_s.max) == (1.25, 2.0)
    assert made.token_s.mean == pytest.approx((1.0 / 7 + 1.0 / 2) / 2)
    assert (made.gap_s.count, made.gap_s.mean) == (3, pytest.approx(2.0 / 3))
    per_step = (made.acceptance, made.accepted_per_step, made.committed_per_step)
    assert per_step == pytest.approx((8 / 20, 8 / 6, 12 / 6))
    assert made.accepted_at == pytest.approx((5 / 6, 2 / 6, 1 / 6))
    assert timeline(served(), 4.0, 4) == [1.0, 7.0, 1.0, 4.0]


def test_a_run_without_requests_has_no_figures() -> None:
    made = summarise([])
    assert (made.requests, made.tokens_per_s, made.requests_per_s) == (0, 0.0, 0.0)
    assert made.latency_s is made.acceptance is made.committed_per_step is None
    assert timeline([], 0.0, 3) == [0.0, 0.0, 0.0]
