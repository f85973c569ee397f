"""A replica's true times and acceptance, from which a draft policy is to learn."""

from __future__ import annotations

from random import Random
from statistics import fmean

from benchmarks.shared.linear import Cost, LinearCost, LinearTimes
from scheduler.config import SchedulerConfig
from scheduler.draft_length.policy import DraftPolicy, StepPlan
from scheduler.messages import (
    Batch,
    BatchKind,
    PrefillRow,
    ReplicaSpec,
    Request,
    Sampling,
    StepResult,
    StepRow,
    StepTimes,
    TriedBatch,
)
from scheduler.simulation.simulated_replica import Resident
from scheduler.state.sequence import Answer, Sequence

LENGTH = 100


class Pair:
    """A replica's true times and a draft's true acceptance; rows of LENGTH tokens."""

    def __init__(self, draft: Cost, verify: Cost, acceptance: float) -> None:
        self.times = LinearTimes(draft, verify, LinearCost(0.0))
        self.acceptance = acceptance
        self.rng = Random(0)

    def step_s(self, rows: int, draft_len: int) -> float:
        return self.times(batch_of(rows_of(rows), draft_len, 1)).total_s

    def goodput(self, rows: int, draft_len: int) -> float:
        expected = sum(self.acceptance**j for j in range(draft_len + 1))
        return rows * expected / self.step_s(rows, draft_len)

    def trials(self) -> tuple[TriedBatch, ...]:
        return tuple(
            self.answer(rows_of(rows), StepPlan([draft_len] * rows, 1))
            for rows in (1, 4, 16)
            for draft_len in (0, 2, 8)
            for _ in range(3)
        )

    def answer(self, rows: list[Sequence], plan: StepPlan) -> TriedBatch:
        residents = []
        for row in rows:
            admitted = PrefillRow(row.id, (), 1, Sampling(), (), 0)
            resident = Resident(admitted, self.acceptance, 0, LENGTH, 0, tokens_left=10_000)
            resident.begin(plan.draft_len)
            for _ in range(plan.steps):
                resident.step(plan.draft_len, self.rng, vocab_size=100)
            residents.append(resident)
        results = tuple(resident.result(plan.steps) for resident in residents)
        batch = batch_of(rows, plan.draft_len, plan.steps)
        one = self.times(batch)
        draft_s, verify_s = plan.steps * one.draft_s, plan.steps * one.verify_s
        times = StepTimes(0.0, draft_s, verify_s, draft_s + verify_s)
        return batch, StepResult(1, "r", results, plan.steps, times)

    def turn(
        self,
        policy: DraftPolicy,
        rows: list[Sequence],
        batches: int,
        steps_most: int = 1,
        round_trip_s: float | None = None,
    ) -> tuple[float, int]:
        """Time and tokens of so many batches of these rows."""
        seconds, tokens = 0.0, 0
        for _ in range(batches):
            batch, result = self.answer(rows, policy.plan("r", rows, steps_most))
            policy.observe(batch, result, answers(rows, result), round_trip_s)
            seconds += result.times.total_s
            tokens += sum(len(row.tokens) for row in result.rows)
        return seconds, tokens


def reached(pair: Pair, policy: DraftPolicy, rows: list[Sequence], goodputs: list[float]) -> float:
    """The mean goodput of the draft lengths of the next 200 batches."""
    chosen = []
    for _ in range(200):
        pair.turn(policy, rows, 1)
        chosen.append(goodputs[policy.estimates("r").draft_len])
    return fmean(chosen)


def batch_of(rows: list[Sequence], draft_len: int, steps: int) -> Batch:
    step_rows = tuple(StepRow(row.id, LENGTH, draft_len, 99) for row in rows)
    return Batch(1, "r", BatchKind.SPECULATE, (), step_rows, draft_len, steps)


def answers(rows: list[Sequence], result: StepResult) -> list[Answer]:
    return list(zip(rows, result.rows, strict=True))


def rows_of(count: int, draft_len: int | None = None) -> list[Sequence]:
    prompt = (1,) * LENGTH
    return [Sequence(Request(str(i), prompt, 10_000, draft_len=draft_len), i) for i in range(count)]


def policy_for(
    pair: Pair | None,
    tried: tuple[TriedBatch, ...] = (),
    spec: dict[str, int | None] | None = None,
    **settings: int | None,
) -> DraftPolicy:
    """A policy that knows the pair's times, or nothing, and what else the replica says."""
    policy = DraftPolicy(SchedulerConfig(**{"rows_max": 8, **settings}))
    trials = (*(pair.trials() if pair else ()), *tried)
    policy.joined("r", ReplicaSpec(1000, 16, 10_000, 100, trials=trials, **(spec or {})))
    return policy


CHEAP = LinearCost(1e-3, 1e-5, 1e-8)
TARGET = LinearCost(10e-3, 3e-4, 1e-7)


def prefill(begin: int, count: int, seconds: float) -> TriedBatch:
    """So many positions behind `begin` others took that long."""
    rows = (PrefillRow("p", (), 9, Sampling(), (), 999, begin, begin + count),)
    batch = Batch(2, "r", BatchKind.PREFILL, prefill=rows)
    return batch, StepResult(2, "r", (), times=StepTimes(prefill_s=seconds))
