"""How a step is run: how many tokens the draft proposes, and how many steps a batch has.

A policy is asked per batch and told every result. Its choice never changes what a request receives,
only how fast. It has no clock and draws nothing at random, or the scheduler would no longer replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.config import PREFILL_TOKENS_LEAST, SchedulerConfig
from scheduler.draft_length.acceptance import Acceptance
from scheduler.draft_length.cost_model import (
    CostModel,
    StepPrices,
    prefilled_in,
)
from scheduler.draft_length.estimates import Beliefs, LinearCost
from scheduler.draft_length.fit import OUTLIER
from scheduler.draft_length.goodput import (
    SHARES,
    Choice,
    DraftBelief,
    best_choice,
    expected_accepted,
    verify_tokens,
)
from scheduler.messages import Batch, BatchKind, ReplicaSpec, StepResult, StepRow
from scheduler.state import Answer, Sequence

FALLBACK = 4
"""Draft tokens while nothing is known of the times."""
TRIALS = (FALLBACK, 0, 2)
"""Draft lengths of the first batches on a replica that measured nothing before it joined."""
TRY_TRIMMED = 64
"""Batches that could be trimmed and are not, until one is, to see what that costs and keeps."""
TRY_TRIMMED_MOST = 1024
"""The same at most: they double with each that has not led to more."""
PROBE_SHARE = 0.01
"""Share of the time without drafting that may go into finding out whether it would pay again."""
TRIP_SHARE = 0.02
"""Share of a batch that its round trip may cost before it gets more steps."""
CHUNK_FIXED_SHARE = 0.25
"""Most that the fixed cost of a prefill chunk may be beside the cost of its tokens."""
BATCH_S_MAX = 0.1
"""Steps of one batch last no longer than that together, in seconds: tokens arrive per batch."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How to run a group."""

    draft_len: int
    """k of the group; a row may have less."""
    steps: int
    verify_tokens: int | None = None
    """Draft tokens of all rows that are verified; None: all."""
    least: int = 0
    """Every row may draft so many tokens, as far as was looked."""


class DraftPolicy(Protocol):
    """Plans each speculate batch."""

    def joined(self, replica_id: str, spec: ReplicaSpec) -> None:
        """A replica is there; called once per incarnation."""

    def lost(self, replica_id: str) -> None:
        """That replica is gone for good."""

    def plan(self, replica_id: str, rows: Rows[Sequence], steps_most: int) -> StepPlan:
        """How to run these rows, which stand by rising length; `steps_most` is at least 1."""

    def apart(self, replica_id: str) -> float:
        """KV positions that a group may read beyond its rows' own; with more, two steps take less
        time than one. Infinitely many where its rows need not read so far, or nothing is known."""

    def prefill_tokens(
        self, replica_id: str, stepping_rows: int, most: int, chunks: int = 1, begin: int = 0
    ) -> int:
        """KV positions that the next prefill batch may fill, in [1, most], while so many rows are
        ready or step: each of them waits for it. It goes in place of so many chunks, and begins
        behind so many positions of its row."""

    def observe(
        self, batch: Batch, result: StepResult, answers: Rows[Answer], trip_s: float | None
    ) -> None:
        """A batch is done: its times, and what its live rows accepted. `trip_s` is what passed
        beside its run, where nothing else was in flight."""

    def beliefs(self, replica_id: str) -> Beliefs:
        """What it believes of a replica that has joined and was not lost."""


@dataclass(slots=True)
class _Known:
    """One replica's model and what was chosen last."""

    draft_len_max: int
    model: CostModel
    trims: bool
    reads_apart: bool
    choice: Choice
    belief: DraftBelief = field(default_factory=DraftBelief)
    untrimmed: int = 0
    """Batches that could have been trimmed, since one was."""
    try_trimmed: int = TRY_TRIMMED
    """Of them, those until the next one is."""
    shares_tried: int = 0
    reach: int = 0
    """How far a row of the last batch read."""
    apart: float = math.inf
    """As of when verifications were last found to cost something else."""
    apart_by: LinearCost = field(default_factory=LinearCost)
    """What they cost then."""
    planned: tuple[int, int, int | None] = (0, 0, None)
    """Rows, draft tokens and verified tokens of the last batch."""
    steps: int = 1
    trip_s: float | None = None
    trials: int = 0
    """Batches planned while the model was of no use."""
    probes: int = 0
    """Probes planned whose results are not there."""
    credit_s: float = 0.0
    """Time saved up for a probe."""
    probe_s: float = 0.0
    """What the last probe cost."""

    def reach_of(self, rows: Rows[Sequence] | Rows[StepRow]) -> int:
        """How far each of these rows reads on average; they stand by rising length."""
        if self.reads_apart:
            return sum([one.length for one in rows]) // len(rows)
        return rows[-1].length

    def step_s(self) -> float:
        """Expected time of a step of the last batch; 0 while nothing is known."""
        _, draft_len, verified = self.planned
        return self._expected_s(draft_len, verified)

    def chosen_step_s(self) -> float:
        """The same with the draft length and the share that were chosen last."""
        return self._expected_s(self.choice.draft_len, verify_tokens(self.planned[0], self.choice))

    def _expected_s(self, draft_len: int, verified: int | None) -> float:
        rows = self.planned[0]
        if not (rows and self.model.timed):
            return 0.0
        return self.model.step_s(rows, draft_len, self.reach, verified)


class GoodputPolicy:
    """The draft length, and what of it is verified, of the greatest goodput; see `goodput`.

    While 0 is chosen, a draft token is proposed now and then to see whether acceptance has changed,
    for at most PROBE_SHARE of the time. A draft length in the config, or a request's for its own
    row, at most that of the config, is followed; all drafted tokens are then verified where it is
    the config's or the longest of its group.

    Steps of a batch: as many as keep its round trip below TRIP_SHARE of it. A prefill chunk: as
    much as takes the time of a step where a full group steps, of more where fewer rows do.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._acceptance = Acceptance()
        self._replicas: dict[str, _Known] = {}

    def joined(self, replica_id: str, spec: ReplicaSpec) -> None:
        trims = spec.trims_drafts and self._config.trim_drafts
        choice = Choice(min(FALLBACK, spec.draft_len_max, self._config.draft_len_max))
        self._replicas[replica_id] = _Known(
            spec.draft_len_max,
            CostModel(spec.timings, spec.reads_apart),
            trims,
            spec.reads_apart,
            choice,
        )

    def lost(self, replica_id: str) -> None:
        del self._replicas[replica_id]

    def plan(self, replica_id: str, rows: Rows[Sequence], steps_most: int) -> StepPlan:
        known = self._replicas[replica_id]
        model, reach = known.model, known.reach_of(rows)
        prices = model.prices(len(rows), reach) if model.known else None
        choice, least = self._choice(known, rows, prices)
        tried = choice.draft_len > known.choice.draft_len
        pins = [one.draft_len for one in rows if one.draft_len]
        if pins:
            pinned = min(max(pins), known.draft_len_max, self._config.draft_len_max)
            if self._config.draft_len is not None:
                # What a server fixes its clients may lower and not raise.
                pinned = min(pinned, self._config.draft_len)
            if pinned >= choice.draft_len:
                choice = Choice(pinned)
        verified = verify_tokens(len(rows), choice)
        known.reach = reach
        if prices is not None and prices.verify is not known.apart_by and not known.reads_apart:
            known.apart_by = prices.verify
            known.apart = prices.positions_of_a_step(
                choice.draft_len, max(known.trip_s or 0.0, 0.0)
            )
        known.planned = (len(rows), choice.draft_len, verified)
        if tried:  # a probe, or a trial of a share
            return StepPlan(choice.draft_len, 1, verified, least)
        known.steps = self._steps(known, steps_most)
        return StepPlan(choice.draft_len, known.steps, verified, least)

    def apart(self, replica_id: str) -> float:
        known = self._replicas[replica_id]
        pinned = self._config.apart_positions
        return known.apart if pinned is None or known.reads_apart else pinned

    def prefill_tokens(
        self, replica_id: str, stepping_rows: int, most: int, chunks: int = 1, begin: int = 0
    ) -> int:
        """A chunk is as much as takes one step's time, so that rows that step lose half their speed
        at most, or more where their group is not full: whoever comes makes it fuller. But always
        enough that its fixed cost is a small part of it. Several at once are as much as takes the
        time of all of them: the fixed cost is then there once."""
        known = self._replicas[replica_id]
        cost = known.model.prefill
        if not (stepping_rows and self._config.prefill_by_time):
            return most
        step_s = known.step_s()
        if step_s <= 0.0 or cost.token_s + cost.kv_s * begin <= 0.0:
            return most
        step_s *= max(self._config.rows_max / stepping_rows, 1.0)
        # Of noise at small depths more than twice that depth is not foretold.
        begin = min(begin, 2 * known.model.filled_behind)
        least = PREFILL_TOKENS_LEAST
        chunk_s = max(
            step_s,
            cost.fixed_s + cost.fixed_s / CHUNK_FIXED_SHARE,
            cost(least, least * begin),
        )
        tokens = round(prefilled_in(chunks * chunk_s, begin, cost))
        return max(1, min(most, max(tokens, least)))

    def observe(
        self, batch: Batch, result: StepResult, answers: Rows[Answer], trip_s: float | None
    ) -> None:
        known = self._replicas[result.replica_id]
        if trip_s is not None and batch.kind is BatchKind.SPECULATE:
            before = trip_s if known.trip_s is None else known.trip_s
            # The least is what matters: a trip is long by chance only.
            known.trip_s = min(trip_s, before + 0.1 * (trip_s - before))
        known.model.observe(batch, result)
        if batch.verify_tokens is not None and result.steps:
            self._learn_belief(known, batch, result, answers)
        if batch.kind is BatchKind.SPECULATE and not batch.draft_len:
            known.credit_s += PROBE_SHARE * result.times.total_s
        if known.probes and batch.draft_len == 1 and result.steps:
            known.probes -= 1
            step_s = known.model.step_s(len(batch.rows), 0, known.reach_of(batch.rows))
            filled_s, plain_s = result.times.prefill_s, result.steps * step_s
            run_s = min(result.times.total_s - filled_s, OUTLIER * plain_s)
            known.probe_s = max(filled_s + run_s - plain_s, 0.0)
            known.credit_s = max(known.credit_s - known.probe_s, -known.probe_s)
        self._acceptance.observe(answers)

    def beliefs(self, replica_id: str) -> Beliefs:
        known = self._replicas[replica_id]
        prices = known.model.prices(known.planned[0], known.reach)
        return Beliefs(
            draft_len=known.choice.draft_len,
            verified=known.choice.share,
            steps=known.steps,
            step_s=known.chosen_step_s(),
            trip_s=known.trip_s or 0.0,
            acceptance_greedy=self._acceptance.overall(greedy=True),
            acceptance_sampled=self._acceptance.overall(greedy=False),
            draft=prices.draft,
            verify=prices.verify,
            packed=prices.packed,
            rest=prices.rest,
            apart_positions=self.apart(replica_id),
            prefill=known.model.prefill,
        )

    # ----------------------------------------------------------------- choices

    def _choice(
        self, known: _Known, rows: Rows[Sequence], prices: StepPrices | None
    ) -> tuple[Choice, int]:
        """And what every row may draft, as `StepPlan` has it. `prices` are those of a step with
        these rows, None while nothing is known of them."""
        if self._config.draft_len is not None:
            known.choice = Choice(min(self._config.draft_len, known.draft_len_max))
            return known.choice, 0
        most = min(known.draft_len_max, self._config.draft_len_max)
        limits = row_draft_lens(rows, most)
        most, least = max(limits), min(limits)
        if most <= 0:
            return Choice(), 0
        if prices is None:
            known.trials += 1
            at = known.trials - 1
            known.choice = Choice(min(TRIALS[at] if at < len(TRIALS) else FALLBACK, most))
            return known.choice, least
        per_step_s = (known.trip_s or 0.0) / known.steps
        # Of one row the first tokens are kept, as if no more had been drafted.
        trims = known.trims and len(rows) > 1
        belief = known.belief if trims else None
        expected = expected_accepted(self._acceptance.of(rows), limits, most)
        known.choice = best_choice(expected, prices, per_step_s, belief, known.choice)
        if known.choice.draft_len:
            known.probes, known.credit_s = 0, 0.0
        elif self._probe_is_due(known, prices):
            known.probes += 1
            return Choice(1), least
        if belief is not None and known.choice.draft_len > 1:
            return self._maybe_trimmed(known, most), least
        return known.choice, least

    def _maybe_trimmed(self, known: _Known, most: int) -> Choice:
        """The choice; or now and then as many verified tokens out of more drafted ones, lest what
        the draft's belief is worth stays unknown."""
        if known.choice.share < 1.0:
            known.untrimmed, known.try_trimmed = 0, TRY_TRIMMED
            return known.choice
        known.untrimmed += 1
        if known.untrimmed < known.try_trimmed:
            return known.choice
        known.untrimmed = 0
        known.try_trimmed = min(2 * known.try_trimmed, TRY_TRIMMED_MOST)
        share = SHARES[known.shares_tried % len(SHARES)]
        known.shares_tried += 1
        return Choice(min(round(known.choice.draft_len / share), most), share)

    def _learn_belief(
        self, known: _Known, batch: Batch, result: StepResult, answers: Rows[Answer]
    ) -> None:
        """What a trimmed batch accepted, against what an even share of it would have."""
        checked = (batch.verify_tokens or 0) / (len(batch.rows) * batch.draft_len)
        share = min(SHARES, key=lambda one: abs(one - checked))
        rows = [sequence for sequence, _ in answers]
        accepted = sum(sum(row.accepted_at) for _, row in answers)
        most = batch.draft_len
        limits = row_draft_lens(rows, most)
        expected = expected_accepted(self._acceptance.of(rows), limits, most)
        known.belief.observe(
            list(expected), Choice(batch.draft_len, share), accepted / result.steps
        )

    def _probe_is_due(self, known: _Known, prices: StepPrices) -> bool:
        if known.credit_s < max(known.probe_s, prices(1) - prices(0)):
            return False
        # Until its result is there no second one is due.
        known.credit_s = 0.0
        return True

    def _steps(self, known: _Known, steps_most: int) -> int:
        trying = 0 < known.trials < len(TRIALS) and not known.model.known
        if trying and self._config.draft_len is None:
            return 1
        step_s = known.step_s() if steps_most > 1 else 0.0
        if known.trip_s is None or step_s <= 0.0:
            return steps_most
        wanted = math.ceil(known.trip_s / (TRIP_SHARE * step_s))
        return max(1, min(wanted, steps_most, int(BATCH_S_MAX / step_s)))


def row_draft_lens(sequences: Iterable[Sequence], draft_len: int) -> list[int]:
    """`row_draft_len` of each."""
    return [
        draft_len
        # True of nearly all, and so not worth a call for each.
        if one.draft_len is None and one.length_max - one.length > draft_len
        else row_draft_len(one, draft_len)
        for one in sequences
    ]


def row_draft_len(sequence: Sequence, draft_len: int) -> int:
    """Draft tokens of one row where its group has `draft_len`: its own, if the request has one,
    and never beyond its limit.

    The target adds one token of its own, so a row with n tokens left drafts at most n - 1.
    """
    pinned = sequence.draft_len
    if pinned is not None and pinned < draft_len:
        draft_len = pinned
    most = sequence.length_max - sequence.length - 1
    return draft_len if draft_len < most else most
