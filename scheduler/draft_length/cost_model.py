"""What a step costs on one replica, learned from the times that it reports.

A step of n rows with k draft tokens takes k draft passes, one verification of n * (k + 1) tokens
and some time for the rest. Each part is fitted by a straight line in what it does: a fixed cost, a
cost per token, a cost per KV position read: the online regression behind a choice by goodput (as in
arXiv 2406.14066). Where a verification of so many tokens was seen to take more than the line says,
or less, it is priced so: its time rises in steps. A prefill is fitted by a line as well; each of
its tokens reads all positions that were filled before. Times are in seconds.

Knows batches and results, nothing of sequences or of what the times are used for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.draft_length.estimates import LinearCost
from scheduler.draft_length.fit import Fit, tokens_key
from scheduler.messages import Batch, BatchKind, PrefillTiming, StepResult, StepTiming

PACKING = 1.05
"""What a verification of some of the draft tokens is taken to cost more, before it was seen."""
CALIBRATED = 4
"""Steps that each time of a replica's calibration stands for: it is a median."""
AT_ONCE = 16
"""Steps that are learned at once at most; of fewer than sixteen times as many, one by one."""


@dataclass(frozen=True, slots=True)
class StepPrices:
    """What a step of a certain group costs, by its draft length."""

    rows: int
    longest: int
    draft: LinearCost
    verify: LinearCost
    packed: LinearCost
    rest: LinearCost
    packed_rest: LinearCost
    ratios: dict[int, float]
    hopes: dict[int, float]
    """`Fit.ratios` and `Fit.hopes` of verifications."""

    def __call__(self, draft_len: int, verify_tokens: int | None = None) -> float:
        """Seconds; `verify_tokens` of the draft tokens are checked, None: all."""
        rows = self.rows
        kv = rows * (self.longest + draft_len)
        tokens = rows * (draft_len + 1)
        if verify_tokens is None:
            target, rest, checked = self.verify, self.rest, tokens
        else:
            target, rest, checked = self.packed, self.packed_rest, rows + verify_tokens
        rest_s = rest.fixed_s + rest.token_s * tokens
        target_s = target.fixed_s + target.token_s * checked + target.kv_s * kv
        draft = self.draft
        each_s = draft.fixed_s + draft.token_s * rows + draft.kv_s * kv
        line_s = rest_s + target_s + draft_len * each_s
        return line_s if verify_tokens is not None else line_s + self.beyond_s(draft_len)

    def beyond_s(self, draft_len: int) -> float:
        """Seconds that a step takes beyond what the lines say, negative where it takes less; all of
        its drafted tokens are verified."""
        ratio = self.ratios.get(tokens_key(self.rows * (draft_len + 1)), 1.0)
        verify_s, slope_s = self.verification()
        return (ratio - 1.0) * (verify_s + draft_len * slope_s)

    def verification(self) -> tuple[float, float]:
        """(a, b) such that by its line a + b * k are the seconds of a verification of all of k
        draft tokens."""
        rows, verify = self.rows, self.verify
        once_s = verify.fixed_s + rows * (verify.token_s + self.longest * verify.kv_s)
        return once_s, rows * (verify.token_s + verify.kv_s)

    def positions_of_a_step(self, draft_len: int, trip_s: float) -> float:
        """KV positions whose reading takes as long as one more step and its batch's round trip;
        infinitely many where reading takes no time."""
        draft, verify = self.draft, self.verify
        position_s = verify.kv_s + draft_len * draft.kv_s
        if position_s <= 0.0:
            return math.inf
        fixed_s = self.rest.fixed_s + verify.fixed_s + draft_len * draft.fixed_s
        return (fixed_s + trip_s) / position_s

    def parabola(self) -> tuple[float, float, float]:
        """(a, b, c) such that a + b * k + c * k**2 and `beyond_s` are the seconds with k draft
        tokens, of which all are verified."""
        rows, draft, verify = self.rows, self.draft, self.verify
        kv, token_s = rows * self.longest, rows * (self.rest.token_s + verify.token_s)
        verify_kv_s, draft_kv_s = rows * verify.kv_s, rows * draft.kv_s
        none_s = self.rest.fixed_s + verify.fixed_s + token_s + verify.kv_s * kv
        pass_s = draft.fixed_s + draft.token_s * rows + draft.kv_s * kv
        return none_s, token_s + verify_kv_s + pass_s, draft_kv_s

    def trimmed(self) -> tuple[float, float, float]:
        """(a, b, d) such that a + b * k + c * k**2 + d * v are the seconds with k draft tokens per
        row, of which v of all rows are verified; c is the one of `parabola`."""
        rows, draft, packed, rest = self.rows, self.draft, self.packed, self.packed_rest
        kv, rest_s, each_s = rows * self.longest, rows * rest.token_s, packed.token_s
        none_s = rest.fixed_s + packed.fixed_s + rest_s + rows * each_s + packed.kv_s * kv
        pass_s = draft.fixed_s + draft.token_s * rows + draft.kv_s * kv
        return none_s, rest_s + rows * packed.kv_s + pass_s, each_s


_Step = tuple[int, int, float, float, float, float, int | None]
"""Arguments of `CostModel._note`."""


class CostModel:
    """Times of one replica. `CostModel()` knows nothing; `known` says when it is of use.

    Its fits learn from some batches at once, but for the first of so many tokens: of the many a
    pool has, each would have to be fetched into the caches for every batch, and few batches change
    what is chosen.
    """

    __slots__ = (
        "_costs",
        "_draft",
        "_hopes",
        "_learned",
        "_packed",
        "_packed_rest",
        "_prefill",
        "_reads_apart",
        "_rest",
        "_unlearned",
        "_verify",
        "filled_behind",
        "known",
        "timed",
    )

    def __init__(
        self, timings: Sequence[StepTiming | PrefillTiming] = (), reads_apart: bool = False
    ) -> None:
        """`timings` are those that the replica measured before it joined; `reads_apart` is its
        spec's."""
        self._reads_apart = reads_apart
        self._draft = Fit()
        self._verify = Fit()
        self._packed = Fit()
        self._rest = Fit()
        self._packed_rest = Fit()
        """Rating what was drafted and choosing among it takes longer than checking all of it."""
        self._prefill = Fit()
        self._costs = (LinearCost(),) * 5
        """The five of `StepPrices`."""
        self._hopes: dict[int, float] = {}
        """The last of `StepPrices`."""
        self._unlearned: list[_Step] = []
        """Steps that the fits do not know yet."""
        self._learned = 0
        self.filled_behind = 0
        """The most KV positions that a prefill batch was seen to fill up to."""
        self.known = False
        """Whether steps of different draft lengths were seen."""
        self.timed = False
        """Whether any step was seen: enough to say what like steps take."""
        for timing in timings:
            if isinstance(timing, PrefillTiming):
                self._prefill.observe(timing.tokens, 0.0, timing.prefill_s)
                continue
            self._note(
                timing.rows,
                timing.draft_len,
                timing.kv_read,
                timing.draft_s,
                timing.verify_s,
                timing.rest_s,
                times=CALIBRATED,
            )
        self._learn()

    def observe(self, batch: Batch, result: StepResult) -> None:
        """A batch was answered with its times."""
        times = result.times
        if batch.kind is BatchKind.PREFILL:
            spans = filled_spans(batch, result)
            before = sum((end - begin) * begin for begin, end in spans)
            self.filled_behind = max([self.filled_behind, *(end for _, end in spans)])
            self._prefill.observe(filled_tokens(batch, result), before, times.prefill_s)
            return
        steps = result.steps
        if not steps:
            return
        # Near their limits rows draft less than the batch says, and so does the group.
        drafted: float
        rows = result.rows
        if steps == 1:
            # Nearly always the first row has drafted as many as any.
            if rows and rows[0].draft_tokens == batch.draft_len:
                drafted = float(batch.draft_len)
            else:
                drafted = float(max([row.draft_tokens for row in rows], default=0))
        else:
            drafted = max([row.draft_tokens / row.steps for row in rows if row.steps], default=0)
        spent_s = times.draft_s + times.verify_s + times.prefill_s
        checked = batch.verify_tokens
        # A step of a fixed shape reads what pads its bucket, too, and one in place whole blocks.
        # Prices are asked for groups and know nothing of it: so the time is put down to what they
        # are asked for, the group's rectangle, or its rows' own positions.
        if self._reads_apart:
            kv_read = result.kv_positions_own / steps
        else:
            longest = batch.rows[-1].length + round(drafted)
            if steps > 1:
                longest += max([len(row.tokens) for row in rows], default=0) // 2
            kv_read = min(result.kv_positions_read / steps, len(batch.rows) * longest)
        unlearned = self._unlearned
        unlearned.append(
            (
                len(batch.rows),
                round(drafted),
                kv_read,
                times.draft_s / steps,
                times.verify_s / steps,
                (times.total_s - spent_s) / steps,
                None if checked is None else len(batch.rows) + checked,
            )
        )
        waiting = len(unlearned)
        new = checked is None and self._verify.is_new(len(batch.rows) * (round(drafted) + 1))
        if waiting >= AT_ONCE or waiting * AT_ONCE > self._learned or new:
            self._learn()

    def prices(self, rows: int, longest: int) -> StepPrices:
        """Of a step of `rows` rows that read as far as one of `longest` tokens of content does."""
        return StepPrices(rows, longest, *self._costs, self._verify.ratios, self._hopes)

    def step_s(
        self, rows: int, draft_len: int, longest: int, verify_tokens: int | None = None
    ) -> float:
        """One such step; `verify_tokens` of its draft tokens are checked, None: all."""
        return self.prices(rows, longest)(draft_len, verify_tokens)

    @property
    def prefill(self) -> LinearCost:
        """One prefill batch, by positions filled and, for each of them, those filled before."""
        return self._prefill.cost()

    def _learn(self) -> None:
        """The fits are told of the steps that they do not know yet."""
        for step in self._unlearned:
            self._note(*step)
        self._learned += len(self._unlearned)
        self._unlearned.clear()
        ratios = self._verify.ratios
        verify, rest = self._verify.cost(), self._rest.cost()
        if self._verify.ratios is not ratios:
            self._hopes = self._verify.hopes()
        if self._packed.kinds:
            packed = self._packed.cost()
        else:
            # As many tokens in full rows, and a little for packing them.
            parts = (verify.fixed_s, verify.token_s, verify.kv_s)
            packed = LinearCost(*(PACKING * part for part in parts))
        packed_rest = self._packed_rest.cost() if self._packed_rest.kinds else rest
        self._costs = (self._draft.cost(), verify, packed, rest, packed_rest)
        self.timed = self._verify.kinds >= 1
        self.known = self._verify.kinds >= 2 and self._draft.kinds >= 1

    def _note(
        self,
        rows: int,
        draft_len: int,
        kv_read: float,
        draft_s: float,
        verify_s: float,
        rest_s: float,
        packed: int | None = None,
        times: int = 1,
    ) -> None:
        """A `StepTiming`. `packed`: tokens of a verification that checked some of the draft tokens
        only; `times` is that of `Fit.observe`."""
        tokens = rows * (draft_len + 1)
        if packed is None:
            self._verify.observe(tokens, kv_read, verify_s, times)
            self._rest.observe(tokens, 0.0, rest_s, times)
        else:
            self._packed.observe(packed, kv_read, verify_s)
            self._packed_rest.observe(tokens, 0.0, rest_s)
        if draft_len:
            self._draft.observe(rows, kv_read, draft_s / draft_len, times)


def filled_spans(batch: Batch, result: StepResult) -> list[tuple[int, int]]:
    """KV positions [begin, end) that a prefill batch computed of each row: not those that the
    replica had already, which may be more than it was to fill."""
    reused = {row.sequence_id: row.reused for row in result.rows}
    spans = []
    for row in batch.prefill:
        begin = max(row.begin, reused.get(row.sequence_id, 0))
        spans.append((begin, max(begin, row.end)))
    return spans


def filled_tokens(batch: Batch, result: StepResult) -> int:
    """How many those are."""
    return sum(end - begin for begin, end in filled_spans(batch, result))


def prefilled_in(seconds: float, begin: int, cost: LinearCost) -> float:
    """KV positions behind `begin` that a prefill batch of one row fills in that time; `cost` is
    that of `CostModel.prefill`, and filling costs something."""
    return max(seconds - cost.fixed_s, 0.0) / (cost.token_s + cost.kv_s * begin)
