"""Ways to generate, measured side by side, and where the time of ours went.

A shared machine's speed drifts, so every ratio is one of the same round, and the median of the
rounds is reported. It also changes within seconds: our own ways begin together and have turns of a
fraction of a second each; the time that counts is each way's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

from cluster.local.engine import LocalEngine, Output, Runner
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, StepResult

SLICE_S = 0.1
"""One turn: some steps, and shorter than the machine's speed stays the same."""

Outputs = list[list[int]]
Way = Callable[[Sequence[Request]], Outputs]
"""New tokens of each request, in the requests' order."""


@dataclass(frozen=True)
class Contender:
    """One way to generate, over all rounds."""

    name: str
    prompts: int
    tokens_per_s: tuple[float, ...]
    """One per round."""
    identical: int
    """Prompts whose output was the expected one in every round."""

    @property
    def speed(self) -> float:
        """Median of the rounds, tokens/s."""
        return median(self.tokens_per_s)

    @classmethod
    def of(
        cls, name: str, runs: Sequence[tuple[Outputs, float]], expected: Sequence[Sequence[int]]
    ) -> Contender:
        """From the outputs and the seconds of each round."""
        prompts = len(runs[0][0])
        identical = sum(
            all(outputs[index] == list(expected[index]) for outputs, _ in runs)
            for index in range(prompts)
        )
        speeds = tuple(sum(map(len, outputs)) / seconds for outputs, seconds in runs)
        return cls(name, prompts, speeds, identical)


def ratio(contenders: Sequence[Contender], above: str, below: str) -> float:
    """Of their speeds, the median of the rounds."""
    speeds = {each.name: each.tokens_per_s for each in contenders}
    return median(a / b for a, b in zip(speeds[above], speeds[below], strict=True))


def _asked(
    name: str, requests: Sequence[Request], counts: Mapping[str, int] | None, number: int
) -> list[Request]:
    """Of a way in a round. Each has its own cache salt: what an earlier run has put into a prefix
    cache would let Lockstep alone skip the prompts."""
    salt = f"{name}, round {number}"
    some = requests[: (counts or {}).get(name, len(requests))]
    return [replace(each, id=f"{name}: {each.id}", cache_salt=salt) for each in some]


@dataclass(frozen=True)
class StepFigures:
    """One run. All but the first are shares."""

    committed_per_step: float
    """Tokens per row and step."""
    acceptance: float | None
    """Draft tokens accepted; None where nothing was drafted."""
    overhead: float
    """Of the steps' time: neither draft nor target forward."""
    between_batches: float
    """Of the time on the wall: outside the replica; the scheduler, above all."""


def over_rounds(runs: Sequence[StepFigures]) -> StepFigures:
    """The median of each figure."""
    assert runs, "nothing has run to its end"
    return StepFigures(**medians(runs))


def medians(runs: Sequence[Any]) -> dict[str, Any]:
    """Of each field of a dataclass's instances; None where one of them has none."""
    by_name = {name: [getattr(run, name) for run in runs] for name in asdict(runs[0])}
    return {name: None if None in values else median(values) for name, values in by_name.items()}


class MeasuredWay:
    """A way to generate with the engine, with figures of each of its runs.

    All requests are submitted at the start.
    """

    def __init__(self, runner: Runner, config: SchedulerConfig) -> None:
        self._runner = runner
        self._config = config
        self._engine: LocalEngine | None = None
        self._since_s = 0.0
        self.seconds = 0.0
        """That the last run has taken so far."""
        self.outputs: list[Output] = []
        """Of the last run, in the order of the requests."""
        self.runs: list[StepFigures] = []
        """Of every run that has ended; clear it after a warm-up."""

    def __call__(self, requests: Sequence[Request]) -> list[list[int]]:
        self.begin(requests)
        while self.advance():
            pass
        return [output.tokens for output in self.outputs]

    def begin(self, requests: Sequence[Request]) -> None:
        """Start a run, for `advance` to go on with; of the one before its figures are kept."""
        self.seconds, self._since_s = 0.0, perf_counter()
        self._engine = LocalEngine(self._runner, self._config, clock=self._own_s)
        self.outputs = [self._engine.submit(request) for request in requests]
        self.seconds = self._own_s()

    def advance(self) -> bool:
        """Run one batch; False once, when the run has ended, and then every request has finished
        and its figures are there."""
        assert self._engine is not None, "begin() comes first"
        self._since_s = perf_counter()
        more = self._engine.advance()
        self.seconds = self._own_s()
        if not more:
            self._engine.check_finished()
            self.runs.append(self._figures(self._engine.results))
        return more

    def _own_s(self) -> float:
        """A clock that stands between two calls: the time of other ways is no time of this run, and
        no slow round trip of a batch for the scheduler."""
        return self.seconds + perf_counter() - self._since_s

    @property
    def figures(self) -> StepFigures:
        """Of the last run that has ended."""
        return self.runs[-1]

    def _figures(self, results: Sequence[StepResult]) -> StepFigures:
        stepped = [result for result in results if result.steps]
        in_steps = sum(result.times.total_s for result in stepped)
        forward = sum(
            result.times.draft_s
            + result.times.verify_s
            + result.times.prefill_s
            - result.times.hidden_s
            for result in stepped
        )
        rows = [row for result in stepped for row in result.rows]
        drafted = sum(row.draft_tokens for row in rows)
        inside = sum(result.times.total_s for result in results)
        return StepFigures(
            committed_per_step=sum(len(row.tokens) for row in rows)
            / sum(row.steps for row in rows),
            acceptance=sum(sum(row.accepted_at) for row in rows) / drafted if drafted else None,
            overhead=1 - forward / in_steps,
            between_batches=1 - inside / self.seconds,
        )


def side_by_side(
    ways: Mapping[str, Way],
    requests: Sequence[Request],
    rounds: int,
    expected: Sequence[Sequence[int]],
    counts: Mapping[str, int] | None = None,
) -> tuple[Contender, ...]:
    """Runs every way once per round and compares its outputs with the `expected` ones.

    Those that are a MeasuredWay run at the same time, after the others in turn. They may share a
    replica: each has its own sequences there. Its KV blocks have to last for all of them.
    `counts`: ways that get only so many of the requests, from the first.
    """
    ours = {name: way for name, way in ways.items() if isinstance(way, MeasuredWay)}
    runs: dict[str, list[tuple[Outputs, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in [name for name in ways if name not in ours]:
            asked = _asked(name, requests, counts, number)
            begun_s = perf_counter()
            outputs = ways[name](asked)
            runs[name].append((outputs, perf_counter() - begun_s))
        for name, way in ours.items():
            way.begin(_asked(name, requests, counts, number))
        _run_together(ours, backwards=bool(number % 2))
        for name, way in ours.items():
            runs[name].append(([output.tokens for output in way.outputs], way.seconds))
    return tuple(Contender.of(name, runs[name], expected) for name in ways)


def _run_together(ways: Mapping[str, MeasuredWay], backwards: bool) -> None:
    """To the end of all; every other turn is in reverse, so that none always follows another."""
    running = dict(ways)
    while running:
        for name in reversed(list(running)) if backwards else list(running):
            way = running[name]
            end_s = way.seconds + SLICE_S
            while way.seconds < end_s:
                if not way.advance():
                    del running[name]
                    break
        backwards = not backwards
