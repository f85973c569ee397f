"""Arrivals are as asked for; experiments over them lose no request and agree with sums."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from statistics import median

import pytest

from scheduler.config import SchedulerConfig
from scheduler.messages import Batch, BatchKind, ReplicaSpec, StepTimes
from scheduler.simulation import (
    Experiment,
    Figures,
    Setup,
    WorkloadRequest,
    drawn,
    lognormal,
    parse_lengths,
    poisson,
    uniform,
)

SPEC = ReplicaSpec(kv_blocks=10_000, block_size=16, context_len=4096, vocab_size=2)


def even_times(batch: Batch) -> StepTimes:
    return StepTimes(total_s=0.002 if batch.kind is BatchKind.PREFILL else 0.010)


def setup(**fields: object) -> Setup:
    made = Setup(replicas=2, spec=SPEC, times=even_times, config=SchedulerConfig())
    return replace(made, **fields)  # type: ignore[arg-type]


def requests(count: int, rate: float | None, seed: int, new: int = 30) -> list[WorkloadRequest]:
    rng = Random(seed)
    arrivals = None if rate is None else poisson(rate, rng)
    return drawn(arrivals, count, uniform(5, 60), uniform(1, new), 0.7, rng)


def run(made: Setup, count: int, rate: float | None = None, new: int = 30) -> Figures:
    return Experiment(made, requests(count, rate, 0, new), Random(0)).run()


def test_draws_are_distributed_as_asked_and_a_seed_repeats_them() -> None:
    def draws(seed: int) -> list[WorkloadRequest]:
        rng = Random(seed)
        return drawn(poisson(5, rng), 2000, uniform(3, 9), lognormal(50, 0.5), 0.7, rng)

    made = draws(3)
    assert draws(3) == made != draws(2)
    assert made[-1].at_s == pytest.approx(2000 / 5, rel=0.1)
    assert {request.prompt_tokens for request in made} == set(range(3, 10))
    assert median(request.new_tokens for request in made) == pytest.approx(50, rel=0.1)
    assert [request.at_s for request in made] == sorted(request.at_s for request in made)
    assert {
        request.at_s for request in drawn(None, 3, uniform(1, 1), uniform(1, 1), 0.7, Random(0))
    } == {0}


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("7", uniform(7, 7)), ("3..9", uniform(3, 9)), ("lognormal:200:0.8", lognormal(200.0, 0.8))],
)
def test_lengths_are_read_and_cut(text: str, lengths: object) -> None:
    first, second = Random(0), Random(0)
    read = parse_lengths(text)
    assert [read(first) for _ in range(50)] == [lengths(second) for _ in range(50)]  # type: ignore[operator]
    assert max(lognormal(100, 3, most=120)(first) for _ in range(50)) == 120


WRONG = ("", "0", "9..3", "x", "lognormal:0:1", "lognormal:5", "lognormal:5:-1", "lognormal:5:inf")


@pytest.mark.parametrize("text", WRONG)
def test_wrong_lengths_say_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected N, N\.\.M or lognormal"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("shards", "in_flight", "pool_batch_s"), [(1, None, 0.0), (2, None, 0.001), (2, 12, 0.0)]
)
def test_every_request_ends_with_all_its_tokens(
    shards: int, in_flight: int | None, pool_batch_s: float
) -> None:
    made = setup(shards=shards, in_flight=in_flight, pool_batch_s=pool_batch_s)
    workload = requests(200, 50, seed=5)
    figures = Experiment(made, workload, Random(0)).run()
    assert (figures.finished, figures.refusals) == (200, [])
    assert figures.tokens == sum(request.new_tokens for request in workload)
    assert (figures.samples[-1].waiting, figures.samples[-1].live) == (0, 0)
    assert all(first > 0 for first in figures.first_token_s)
    pairs = zip(figures.first_token_s, figures.latency_s, strict=True)
    assert all(first <= latency for first, latency in pairs)


def test_refused_requests_end_too() -> None:
    made = setup(replicas=1, config=SchedulerConfig(waiting_requests_max=3, residents_max=8))
    figures = run(made, 100, 1000)
    assert figures.finished + len(figures.refusals) == 100
    assert figures.refusals[0] == "3 requests wait already"


@pytest.mark.parametrize("at_s", [0.0, 1.7e9])
def test_a_lone_request_takes_its_prefill_its_steps_and_its_messages(at_s: float) -> None:
    """20 tokens at acceptance 1 and k = 4: four steps, the first of them in a batch of its own.
    Of tokens that come at once there is no time per token, as in `cluster.bench.figures`."""
    config = SchedulerConfig(draft_len=4)
    made = setup(replicas=1, message_s=(0.001, 0.001), config=config)
    figures = Experiment(made, [WorkloadRequest(at_s, 10, 5, 1.0)], Random(0)).run()
    assert (figures.tokens, figures.per_token_s) == (5, [])
    figures = Experiment(made, [WorkloadRequest(at_s, 10, 20, 1.0)], Random(0)).run()
    way_s, back_s = 0.001, 0.002
    batches_s = (0.002, 0.010, 0.030)
    expected_s = way_s + sum(batch_s + back_s for batch_s in batches_s)
    near = partial(pytest.approx, rel=1e-4)
    assert figures.latency_s[0] == near(expected_s)
    assert figures.first_token_s[0] == near(expected_s - 0.030 - back_s)
    assert figures.per_token_s[0] == near((0.030 + back_s) / 15)
    assert figures.tokens / figures.sums.row_steps == 5.0
    assert figures.samples[0].at_s == at_s
    assert figures.elapsed_s == near(expected_s)
    assert figures.tokens_per_s() == near(20 / expected_s)


def test_a_pool_that_takes_time_is_where_throughput_ends() -> None:
    """A batch costs a pool 5 ms and a replica 10 ms: two replicas are the most that one feeds."""
    rates = {}
    for replicas, shards in ((1, 1), (2, 1), (8, 1), (8, 4)):
        made = setup(replicas=replicas, shards=shards, pool_batch_s=0.005, in_flight=16 * replicas)
        made = replace(made, config=SchedulerConfig(steps_per_batch_max=1))
        figures = run(made, 150 * replicas, new=60)
        rates[replicas, shards] = figures.tokens_per_s()
        assert figures.pool_utilisation(shards) <= 1.001
        if (replicas, shards) == (8, 1):
            assert figures.pool_utilisation(1) > 0.97
            assert figures.utilisation(8) < 0.35
    assert rates[8, 1] < 1.4 * rates[2, 1]
    assert rates[8, 4] > 3.8 * rates[8, 1]
