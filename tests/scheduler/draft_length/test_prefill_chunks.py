"""Proves that a prefill chunk takes as long as the rows that step may wait for it."""

from __future__ import annotations

import pytest

from benchmarks.shared.linear import LinearCost
from scheduler.config import PREFILL_TOKENS_LEAST
from scheduler.draft_length.policy import CHUNK_FIXED_SHARE, CHUNK_STEPS_MAX, DraftPolicy
from tests.scheduler.draft_length.pair import CHEAP, TARGET, Pair, policy_for, prefill, rows_of


def test_a_prefill_chunk_takes_a_steps_time_but_only_where_rows_step() -> None:
    """And is smaller the more lies before it, once it was seen what that costs; but never smaller
    than the least, though a step takes less time than that."""
    pair = Pair(CHEAP, TARGET, acceptance=0.0)

    def tried(truth: LinearCost) -> DraftPolicy:
        """Of a replica that has tried steps and prefills."""
        prefills = tuple(prefill(0, tokens, truth(tokens, 0)) for tokens in (16, 64, 256))
        policy = policy_for(pair, prefills, draft_len=0)
        pair.turn(policy, rows_of(8), 1)
        return policy

    for token_s in (1.1e-3, 1.2e-3, 1.3e-3):
        assert pair.step_s(8, 0) < token_s * PREFILL_TOKENS_LEAST
        slow = tried(LinearCost(0.0, token_s))
        assert slow.prefill_tokens("r", 8, 2048, 0) == PREFILL_TOKENS_LEAST
    truth = LinearCost(1e-3, 1e-4, 1e-8)
    policy = policy_for(pair, draft_len=0)
    assert policy.prefill_tokens("r", 4, 2048, 0) == 2048, "as long as nothing is known"
    policy = tried(truth)
    first = policy.prefill_tokens("r", 8, 2048, 0)
    assert truth(first, 0) == pytest.approx(pair.step_s(8, 0), rel=0.1)
    wider = policy.prefill_tokens("r", 2, 2048, 0)
    assert truth(wider, 0) == pytest.approx(4 * pair.step_s(8, 0), rel=0.1), "a quarter full"
    assert policy.prefill_tokens("r", 8, 50, 0) == 50
    assert policy.prefill_tokens("r", 0, 2048, 0) == 2048
    for begin in (first, 4000, 9000):
        policy.observe(*prefill(begin, 64, truth(64, 64 * begin)), [], None)
    deep = policy.prefill_tokens("r", 8, 2048, 9000)
    assert truth(deep, 9000 * deep) == pytest.approx(pair.step_s(8, 0), rel=0.1)
    assert deep < 0.8 * first


def filling(truth: LinearCost, rows_max: int = 8, step_s: float = 20e-3) -> DraftPolicy:
    """Of a replica whose steps take step_s, and that has filled prompts behind 0 and 1,000."""
    pair = Pair(CHEAP, LinearCost(step_s), acceptance=0.0)
    policy = policy_for(pair, draft_len=0, rows_max=rows_max)
    pair.turn(policy, rows_of(8), 3)
    for begin, tokens in ((0, 16), (0, 64), (0, 256), (0, 1024), (1000, 64), (1000, 256)) * 4:
        policy.observe(*prefill(begin, tokens, truth(tokens, tokens * begin)), [], None)
    return policy


def test_where_few_rows_step_a_chunk_takes_some_steps_and_no_more() -> None:
    truth = LinearCost(0.0, 1e-4)
    policy = filling(truth, rows_max=64)
    for stepping, steps in (
        (128, 1.0),
        (64, 1.0),
        (32, 2.0),
        (16, 4.0),
        (8, 8.0),
        (1, CHUNK_STEPS_MAX),
    ):
        chunk = policy.prefill_tokens("r", stepping, 10_000, 0)
        assert truth(chunk, 0) == pytest.approx(min(steps, CHUNK_STEPS_MAX) * 20e-3, rel=0.05)


def test_a_chunk_is_measured_once_prefills_of_two_sizes_were_seen() -> None:
    pair = Pair(CHEAP, LinearCost(20e-3), acceptance=0.0)
    policy = policy_for(pair, draft_len=0)
    pair.turn(policy, rows_of(8), 3)
    policy.observe(*prefill(0, 1024, 102.4e-3), [], None)
    assert policy.prefill_tokens("r", 8, 10_000, 0) == 10_000
    policy.observe(*prefill(4096, 1024, 202.4e-3), [], None)
    assert policy.prefill_tokens("r", 8, 10_000, 4096) == 10_000, "whatever lay before it"
    policy.observe(*prefill(0, 64, 6.4e-3), [], None)
    assert policy.prefill_tokens("r", 8, 10_000, 0) == pytest.approx(200, rel=0.05)


def test_a_chunk_is_not_measured_by_steps_of_which_nothing_is_known() -> None:
    tried = tuple(prefill(0, tokens, 1e-4 * tokens) for tokens in (64, 1024))
    policy = policy_for(None, tried, draft_len=0)
    policy.plan("r", rows_of(8), 1)
    assert policy.prefill_tokens("r", 8, 10_000, 0) == 10_000


def test_a_chunk_is_the_most_that_takes_no_longer_than_it_may() -> None:
    """To the token: 200 take 20 ms, 201 longer than the 20.05 ms of a step; and all where they
    take less."""
    policy = filling(LinearCost(0.0, 1e-4), step_s=20.05e-3)
    asked = [policy.prefill_tokens("r", 8, most, 0) for most in (10_000, 201, 200, 199, 1)]
    assert asked == [200, 200, 200, 199, 1]


def test_what_a_chunk_costs_whatever_it_fills_is_a_small_part_of_it() -> None:
    truth = LinearCost(30e-3, 1e-4)
    chunk = filling(truth).prefill_tokens("r", 8, 10_000, 0)
    assert 30e-3 / (truth(chunk, 0) - 30e-3) == pytest.approx(CHUNK_FIXED_SHARE, rel=1e-3)


def test_depth_makes_a_chunk_smaller_as_far_as_twice_the_depth_that_was_seen() -> None:
    truth = LinearCost(0.0, 1e-4, 1e-7)
    policy = filling(truth)
    chunks = [policy.prefill_tokens("r", 8, 10_000, begin) for begin in range(0, 6000, 250)]
    assert chunks == sorted(chunks, reverse=True)
    deepest = 2 * (1000 + 256)
    assert policy.prefill_tokens("r", 8, 10_000, deepest - 100) > chunks[-1]
    assert policy.prefill_tokens("r", 8, 10_000, deepest) == chunks[-1]
    assert policy.prefill_tokens("r", 8, 10_000, 10**6) == chunks[-1]
