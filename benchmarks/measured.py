"""Runs of the engine that remember what its results say: where the time went, padding, waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

from cluster.local_engine import LocalEngine, Output, Runner
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, StepResult


@dataclass(frozen=True)
class StepFigures:
    """One run. All but the first two are shares."""

    committed_per_step: float
    """Tokens per row and step."""
    wait_rounds: float
    """Longest wait of a resident between two steps; see `longest_wait`."""
    acceptance: float | None
    """Draft tokens accepted; None where nothing was drafted."""
    overhead: float
    """Of the steps' time: neither draft nor target forward."""
    padding: float
    """Of the KV positions read: beyond a row's own."""
    between_batches: float
    """Of the time on the wall: outside the replica; the scheduler, above all."""


def over_rounds(runs: Sequence[StepFigures]) -> StepFigures:
    """The median of each figure, and the greatest of the longest waits."""
    assert runs, "nothing has run to its end"
    overall: dict[str, Any] = {}
    for name in asdict(runs[0]):
        values = [getattr(run, name) for run in runs]
        overall[name] = None if None in values else median(values)
    overall["wait_rounds"] = max(run.wait_rounds for run in runs)
    return StepFigures(**overall)


class MeasuredWay:
    """A way to generate, as `cluster.bench.compare` has them, with figures of each of its runs.

    All requests are submitted at the start.
    """

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._runner = runner
        self._config = config
        self._clock = clock
        self._engine: LocalEngine | None = None
        self._since_s = 0.0
        self.seconds = 0.0
        """That the last run has taken so far."""
        self.outputs: list[Output] = []
        """Of the last run, in the requests' batch."""
        self.runs: list[StepFigures] = []
        """Of every run that has ended; clear it after a warm-up."""

    def __call__(self, requests: Sequence[Request]) -> list[list[int]]:
        self.begin(requests)
        while self.advance():
            pass
        return [output.tokens for output in self.outputs]

    def begin(self, requests: Sequence[Request]) -> None:
        """Start a run, for `advance` to go on with; of the one before its figures are kept."""
        self.seconds, self._since_s = 0.0, self._clock()
        self._engine = LocalEngine(self._runner, self._config, clock=self._own_s)
        self.outputs = [self._engine.submit(request) for request in requests]
        self.seconds = self._own_s()

    def advance(self) -> bool:
        """Run one batch; False once, when the run has ended, and then every request has finished
        and its figures are there."""
        assert self._engine is not None, "begin() comes first"
        self._since_s = self._clock()
        more = self._engine.advance()
        self.seconds = self._own_s()
        if not more:
            self._engine.check_finished()
            self.runs.append(self._figures(self._engine.results))
        return more

    def _own_s(self) -> float:
        """A clock that stands between two calls: what others do then is no time of this run, nor
        may the scheduler take it for a slow trip of a batch."""
        return self.seconds + self._clock() - self._since_s

    @property
    def figures(self) -> StepFigures:
        """Of the last run that has ended."""
        return self.runs[-1]

    def _figures(self, results: Sequence[StepResult]) -> StepFigures:
        stepped = [result for result in results if result.steps]
        in_steps = sum(result.times.total_s for result in stepped)
        forward = sum(
            result.times.draft_s + result.times.verify_s + result.times.prefill_s
            for result in stepped
        )
        rows = [row for result in stepped for row in result.rows]
        drafted = sum(row.draft_tokens for row in rows)
        own = sum(result.kv_positions_own for result in stepped)
        read = sum(result.kv_positions_read for result in stepped)
        inside = sum(result.times.total_s for result in results)
        return StepFigures(
            committed_per_step=sum(len(row.tokens) for row in rows)
            / sum(row.steps for row in rows),
            wait_rounds=longest_wait(
                results, self._config.rows_max, self._config.batches_in_flight_max
            ),
            acceptance=sum(sum(row.accepted_at) for row in rows) / drafted if drafted else None,
            overhead=1 - forward / in_steps,
            padding=1 - own / read,
            between_batches=1 - inside / self.seconds,
        )


def longest_wait(results: Sequence[StepResult], rows_max: int, batches_in_flight: int) -> float:
    """Longest wait between two steps of a sequence, or from its prefill to its first, in rounds.

    A round is as many groups of `rows_max` as hold all residents of that time once. Batches that
    were with the replica already when the sequence became ready were not chosen over it and do not
    count. `results` are all those of one replica, in order, of sequences that stay to their end.
    """
    last = {row.sequence_id: n for n, result in enumerate(results) for row in result.rows}
    ready: dict[str, tuple[int, int]] = {}
    """By resident: the result that brought it back, or in, and how many had stepped until then."""
    residents: list[int] = []
    """How many there were after each result."""
    stepped = 0
    longest = 0.0
    for n, result in enumerate(results):
        stepped += result.steps > 0
        for row in result.rows:
            if result.steps and row.sequence_id in ready:
                since, before = ready[row.sequence_id]
                groups = math.ceil(max(residents[since:]) / rows_max)
                passes = max(stepped - before - batches_in_flight, 0)
                longest = max(longest, (passes + 1) / groups)
            ready[row.sequence_id] = (n, stepped)
        residents.append(len(ready))
        for row in result.rows:
            if last[row.sequence_id] == n:
                del ready[row.sequence_id]
    return longest
