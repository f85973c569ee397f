"""Proves: what the cluster is measured against is right to the step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cluster.ideal import PLAYS, ideal
from benchmarks.cluster.load import Load
from benchmarks.cluster.parts import load_of
from benchmarks.shared.synthetic import Speed
from scheduler.config import SchedulerConfig
from scheduler.messages import ReplicaSpec, Request
from scheduler.simulation import reference_output

SPEC = ReplicaSpec(kv_blocks=4000, block_size=16, context_len=1024, vocab_size=4096)
SPEED = Speed(step_s=0.01, prefill_s=0.02, start_s=0.0, acceptance=0.0, prefill_token_s=0.001)


def test_one_client_waits_for_its_own_prefills_and_steps_and_for_nothing_else() -> None:
    load = Load([[1, 2, 3], [4] * 6], new_tokens=10, in_flight=1)
    base = ideal(load, SPEC, SPEED, 1, SchedulerConfig())
    # A token a step, for nothing is accepted.
    each_s = [0.02 + 0.003 + 0.1, 0.02 + 0.006 + 0.1]
    assert base.latencies_s == pytest.approx(each_s * PLAYS)
    assert base.tokens_per_s == pytest.approx(20 / sum(each_s))


def test_the_base_is_the_mean_over_the_luck_of_the_drafts() -> None:
    load = load_of(SPEC, in_flight=8, requests=32, new_tokens=20)
    lucky = replace(SPEED, acceptance=0.7)
    base = ideal(load, SPEC, lucky, 1, SchedulerConfig())
    plays = [base.latencies_s[begin : begin + 32] for begin in range(0, 32 * PLAYS, 32)]
    assert len(set(plays)) == PLAYS, "every play has luck of its own"
    assert base.tokens_per_s > ideal(load, SPEC, SPEED, 1, SchedulerConfig()).tokens_per_s


def test_replicas_share_the_clients_and_tokens_are_right() -> None:
    load = load_of(SPEC, in_flight=8, requests=32, new_tokens=20)
    one, four = (ideal(load, SPEC, SPEED, n, SchedulerConfig(rows_max=2)) for n in (1, 4))
    assert 2.5 < four.tokens_per_s / one.tokens_per_s <= 4
    expected = [
        list(reference_output(Request("", tuple(prompt), 20), SPEC.vocab_size)[0])
        for prompt in load.prompts
    ]
    assert one.tokens == four.tokens == expected
