"""How a step is run: how many tokens the draft proposes, and how many steps a batch has.

The policy is asked per batch and told every result. Its choice never changes what a request
receives, only how fast. It has no clock and draws nothing at random, or the scheduler would no
longer replay.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate

from scheduler.config import PREFILL_TOKENS_LEAST, SchedulerConfig
from scheduler.draft_length.acceptance import AcceptanceRates, goodputs, likelihoods
from scheduler.draft_length.latency import LatencyTable
from scheduler.messages import Batch, BatchKind, ReplicaSpec, StepResult, StepRow
from scheduler.state import Answer, Sequence, computed

FALLBACK = 4
"""Draft tokens of the first batches on a replica that measured nothing before it joined."""
PROBE_SHARE = 0.005
"""Share of the time that may go into finding out whether another draft length would pay."""
PROBE_SAVED = 2.0
"""Steps whose time is saved up for probes at most, and is there at the start."""
ROUND_TRIP_RATE = 0.1
"""Weight of a longer round trip in the mean."""
ROUND_TRIP_SHARE = 0.02
"""Share of a batch that its round trip may cost before it gets more steps."""
GAP_SHARE = 0.1
"""Share of a step that a replica may stand still after a prefill, so that its rows join at once."""
CHUNK_STEPS_MAX = 8.0
"""Steps whose time a prefill chunk takes at most, however few rows step."""
CHUNK_FIXED_SHARE = 0.125
"""Most that the fixed cost of a prefill chunk may be beside the cost of its tokens."""
TURNS_GAIN = 1.03
"""By which two batches in turns are to be faster than one of all their rows: to part and to join
rows costs a step."""
BATCH_S_MAX = 0.1
"""Steps of one batch last no longer than that together, in seconds: tokens arrive per batch."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How to run a batch."""

    draft_lens: list[int]
    """Draft tokens of each row per step."""
    steps: int

    @property
    def draft_len(self) -> int:
        """k of the batch."""
        return max(self.draft_lens)


@dataclass(frozen=True, slots=True)
class CostEstimates:
    """What a policy expects of one replica, and chose last; times in seconds."""

    draft_len: int = 0
    """k as it was chosen last; probes and what requests ask for themselves are left out."""
    step_s: float = 0.0
    """Expected time of such a step with the rows of the last batch; 0 while nothing is known."""
    acceptance_greedy: float = 0.0
    """Probability that one more draft token is accepted, lately and over all sequences."""
    acceptance_sampled: float = 0.0


@dataclass(slots=True)
class _Known:
    """What is known of one replica, and what was chosen last."""

    table: LatencyTable
    most: int
    """Draft tokens per row and step that it can propose."""
    fixed: int | None
    """Its draft length, where that is not chosen."""
    draft_len: int
    """As it was chosen last."""
    planned: tuple[int, int, int] | None = None
    """Rows, draft tokens and KV positions of the last batch."""
    steps: int = 1
    round_trip_s: float | None = None
    credit_s: float = math.inf
    """Time saved up for probes."""
    filled_behind: int = 0
    """The most KV positions that a prefill batch filled up to."""

    def step_s(self) -> float:
        """Expected time of a step of the last batch; 0 while nothing is known."""
        return self.table.step_s(*self.planned) if self.planned else 0.0


class DraftPolicy:
    """Drafts what has the greatest goodput by a latency table and by acceptance.

    A draft length in the config or in the replica's spec is followed, and so is a request's for its
    own row, as far as the server allows it.

    Probing: PROBE_SHARE of the time may be lost to batches that find out whether another draft
    length would pay. Those are lengths whose time was not seen lately, first the one that is
    expected to lose least; and 1 while 0 is chosen, for nothing else shows that acceptance has
    changed. A probe is due when what it is expected to lose is saved up.

    Steps of a batch: as many as keep its round trip below ROUND_TRIP_SHARE of it. A prefill chunk:
    as much as takes the time of a step where a full batch steps, of more where fewer rows do.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._acceptance = AcceptanceRates()
        self._replicas: dict[str, _Known] = {}

    def joined(self, replica_id: str, spec: ReplicaSpec) -> None:
        """A replica is there; called once per incarnation."""
        fixed = [k for k in (self._config.draft_len, spec.draft_len) if k is not None]
        most = min(spec.draft_len_max, self._config.draft_len_max)
        known = self._replicas[replica_id] = _Known(
            table=LatencyTable(),
            most=most,
            fixed=min(*fixed, spec.draft_len_max) if fixed else None,
            draft_len=min(FALLBACK, most),
        )
        for batch, result in spec.trials:
            self._observe_times(known, batch, result)
        if spec.acceptance is not None:
            self._acceptance.expect(spec.acceptance)

    def lost(self, replica_id: str) -> None:
        del self._replicas[replica_id]

    def plan(
        self, replica_id: str, rows: Rows[Sequence], steps_most: int, in_turns: bool = False
    ) -> StepPlan:
        """How to run these rows, which stand by rising length; `steps_most` is at least 1.
        `in_turns`: it is drafted while another batch is checked."""
        known = self._replicas[replica_id]
        kv, probe = _kv_of(rows), None
        if known.fixed is not None:
            # What a server fixes its clients may lower and not raise.
            draft_len = known.draft_len = known.fixed
        else:
            probe = self._choose(known, rows, kv, in_turns)
            draft_len = known.draft_len if probe is None else probe
            asked = [row.request.draft_len for row in rows if row.request.draft_len]
            if asked:
                draft_len = max(draft_len, min(max(asked), known.most))
        known.planned = (len(rows), draft_len, kv)
        steps = 1
        if probe is None:
            steps = known.steps = self._steps(known, steps_most)
        return StepPlan([row_draft_len(row, draft_len) for row in rows], steps)

    def short_gap(self, replica_id: str) -> bool:
        """Whether a round trip takes so small a part of a step that rows may wait for a prefill to
        end, and step together with those that it fills."""
        known = self._replicas[replica_id]
        round_trip_s = known.round_trip_s
        return round_trip_s is not None and round_trip_s <= GAP_SHARE * known.step_s()

    def turns_pay(self, replica_id: str, rows: Rows[Sequence], whole: int, turn: int) -> bool:
        """Whether two batches of `turn` rows that take turns, one drafted while the other is
        checked, are faster than one of `whole` rows; `rows`, one at least, are some of them."""
        known = self._replicas[replica_id]
        table, idle_s = known.table, known.round_trip_s or 0.0
        if not table.known:
            return False
        choices = range(known.most + 1) if known.fixed is None else [known.fixed]
        kv, likely = _kv_of(rows) // len(rows), sum(self._acceptance.of(rows)) / len(rows)
        # A batch of all rows has several steps, so no round trip counts.
        one_s = table.steps_s(whole, choices[-1], whole * kv)
        two_s = table.turns_s(turn, choices[-1], turn * kv, idle_s)
        tokens = list(accumulate([likely**position for position in range(len(one_s))]))
        one = max([whole * tokens[k] / one_s[k] for k in choices])
        return max([turn * tokens[k] / two_s[k] for k in choices]) > TURNS_GAIN * one

    def prefill_tokens(self, replica_id: str, stepping_rows: int, most: int, begin: int) -> int:
        """KV positions that the next prefill batch may fill, in [1, most], while so many rows are
        ready or step: each of them waits for it. It begins behind `begin` positions of its row.

        A chunk is as much as takes one step's time, so that rows that step lose half their speed at
        most, or more where their batch is not full: further rows make it fuller. But always enough
        that its fixed cost is a small part of it."""
        known = self._replicas[replica_id]
        table, step_s = known.table, known.step_s()
        if not stepping_rows or step_s <= 0.0 or len(table.prefill) < 2:
            return most
        # Of noise at small depths more than twice that depth is not foretold.
        begin = min(begin, 2 * known.filled_behind)
        chunk_s = max(
            step_s * min(max(self._config.rows_max / stepping_rows, 1.0), CHUNK_STEPS_MAX),
            table.prefill_s(0, begin) * (1.0 + 1.0 / CHUNK_FIXED_SHARE),
        )
        tokens = bisect_right(
            range(1, most + 1), chunk_s, key=lambda count: table.prefill_s(count, begin)
        )
        return max(tokens, min(most, PREFILL_TOKENS_LEAST))

    def observe(
        self, batch: Batch, result: StepResult, answers: Rows[Answer], round_trip_s: float | None
    ) -> None:
        """A batch is done: its times, and what its live rows accepted. `round_trip_s` is what
        passed beside its run, where nothing else was in flight."""
        known = self._replicas[result.replica_id]
        if result.steps and round_trip_s is not None:
            before_s = known.round_trip_s
            if before_s is not None:
                # The least is what matters: a round trip is long by chance only.
                mean_s = before_s + ROUND_TRIP_RATE * (round_trip_s - before_s)
                round_trip_s = min(round_trip_s, mean_s)
            known.round_trip_s = round_trip_s
        self._observe_times(known, batch, result)
        self._acceptance.observe(answers)

    def estimates(self, replica_id: str) -> CostEstimates:
        """What is expected of a replica that has joined and was not lost."""
        known = self._replicas[replica_id]
        step_s = 0.0
        if known.planned:
            rows, _, kv = known.planned
            step_s = known.table.step_s(rows, known.draft_len, kv)
        return CostEstimates(
            draft_len=known.draft_len,
            step_s=step_s,
            acceptance_greedy=self._acceptance.overall(greedy=True),
            acceptance_sampled=self._acceptance.overall(greedy=False),
        )

    # ----------------------------------------------------------------- choices

    def _choose(self, known: _Known, rows: Rows[Sequence], kv: int, in_turns: bool) -> int | None:
        """Makes the best choice the replica's. Returns a probe's draft length, if one is due."""
        limits = [row_draft_len(row, known.most) for row in rows]
        table, most = known.table, max(limits)
        if not table.known:
            # A drafted step and one without, and something is known.
            known.draft_len = 0 if len(table.draft) else min(FALLBACK, most)
            return None
        count, idle_s = len(rows), (known.round_trip_s or 0.0) / known.steps
        if in_turns:
            seconds = table.turns_s(count, most, kv, idle_s)
        else:
            seconds = [step_s + idle_s for step_s in table.steps_s(count, most, kv)]
        likely = likelihoods(self._acceptance.of(rows), limits, most)
        by_draft_len = goodputs(likely, count, seconds)
        goodput = max(by_draft_len)
        best = known.draft_len = by_draft_len.index(goodput)
        lost_s = [(1.0 - by_draft_len[k] / goodput) * seconds[k] for k in range(most + 1)]
        credit_s = min(known.credit_s, PROBE_SAVED * seconds[best])
        for k in sorted(range(most + 1), key=lost_s.__getitem__):
            if (
                lost_s[k] <= credit_s
                and k != best
                and (table.stale(count, k) or (k == 1 and not best))
            ):
                known.credit_s = credit_s - lost_s[k]
                return k
        return None

    def _steps(self, known: _Known, steps_most: int) -> int:
        step_s = known.step_s()
        if known.round_trip_s is None or step_s <= 0.0:
            return steps_most
        wanted = math.ceil(known.round_trip_s / (ROUND_TRIP_SHARE * step_s))
        return max(1, min(wanted, steps_most, int(BATCH_S_MAX / step_s)))

    # ----------------------------------------------------------------- results

    def _observe_times(self, known: _Known, batch: Batch, result: StepResult) -> None:
        if batch.kind is BatchKind.PREFILL:
            self._observe_prefill(known, batch, result)
        elif result.steps:
            self._observe_steps(known, batch, result)

    def _observe_prefill(self, known: _Known, batch: Batch, result: StepResult) -> None:
        tokens = before = 0
        for begin, end in computed(batch, result):
            tokens += end - begin
            before += (end - begin) * begin
            known.filled_behind = max(known.filled_behind, end)
        known.table.observe_prefill(tokens, before, result.times.prefill_s)

    def _observe_steps(self, known: _Known, batch: Batch, result: StepResult) -> None:
        times, steps, rows = result.times, result.steps, len(batch.rows)
        # Near their limits less is asked of rows than the batch says. What a drafter did not
        # propose counts as asked for: its time is what asking takes on average.
        asked = max([row.asked_tokens / row.steps for row in result.rows if row.steps], default=0)
        draft_len = round(asked)
        in_step_s = times.prefill_s + times.draft_s - times.hidden_s
        rest_s = (times.total_s - in_step_s) / steps
        kv = _kv_of(batch.rows)
        known.table.observe_step(rows, draft_len, kv, times.draft_s / steps, rest_s)
        known.credit_s += PROBE_SHARE * times.total_s
        if batch.draft_len and not known.draft_len:
            known.credit_s -= times.prefill_s  # a probe made the draft catch up


def _kv_of(rows: Rows[Sequence] | Rows[StepRow]) -> int:
    """KV positions that a step of these rows reads."""
    return sum([row.length for row in rows])


def row_draft_len(sequence: Sequence, draft_len: int) -> int:
    """Draft tokens of one row where its batch has `draft_len`: its own, if the request has one, and
    never beyond its limit.

    The target adds one token of its own, so a row with n tokens left drafts at most n - 1.
    """
    own = sequence.request.draft_len
    if own is not None:
        draft_len = min(own, draft_len)
    left = sequence.length_max - sequence.length
    return draft_len if draft_len < left else left - 1
