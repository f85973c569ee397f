"""What a run of chaos amounts to: counts, silences, and what a killed replica cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.chaos.kills import Kind, Struck
from tests.chaos.load import GOOD, Outcome, Verdict

_CENTRAL = (Kind.POOL, Kind.FRONTEND, Kind.PROXY)
_AFTERMATH_S = 1.0
"""A silence belongs to the strikes within it or so shortly before it."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed; 0 without values."""
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)] if ranked else 0.0


@dataclass(frozen=True)
class Added:
    """Latency beyond the median of undisturbed requests of the same kind, in seconds."""

    requests: int
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Added:
        return cls(len(values), percentile(values, 0.5), percentile(values, 0.99))


def silence_by_cause(outcomes: Iterable[Outcome], struck: Sequence[Struck]) -> dict[str, float]:
    """Longest silence within a stream by the kinds of strikes around it."""
    longest: dict[str, float] = defaultdict(float)
    for outcome in outcomes:
        if not outcome.silence_s:
            continue
        first_s = outcome.silent_from_s - _AFTERMATH_S
        last_s = outcome.silent_from_s + outcome.silence_s
        causes = {one.kind for one in struck if first_s <= one.ended_s and one.began_s <= last_s}
        name = "+".join(sorted(causes)) or "none"
        longest[name] = max(longest[name], outcome.silence_s)
    return dict(sorted(longest.items(), key=lambda item: -item[1]))


def added_latency(outcomes: Iterable[Outcome], struck: Sequence[Struck]) -> tuple[Added, Added]:
    """(of requests whose replica was killed under them, of undisturbed ones).

    Not counted are those that a killed pool, frontend or proxy disturbed as well.
    """
    calm: dict[tuple[int, bool], list[float]] = defaultdict(list)
    hit: list[Outcome] = []
    undisturbed: list[Outcome] = []
    for outcome in outcomes:
        if outcome.verdict() is not Verdict.RIGHT or outcome.end is None:
            continue
        around = [one for one in struck if _overlap(outcome, one)]
        if not around and not outcome.end.recovered:
            undisturbed.append(outcome)
            calm[_sort(outcome)].append(outcome.total_s)
        elif not any(one.kind in _CENTRAL for one in around) and any(
            one.kind is Kind.REPLICA and _served(outcome, one) for one in around
        ):
            hit.append(outcome)
    usual_s = {sort: median(seconds) for sort, seconds in calm.items()}

    def added(of: Sequence[Outcome]) -> Added:
        known = [one for one in of if _sort(one) in usual_s]
        return Added.of([one.total_s - usual_s[_sort(one)] for one in known])

    return added(hit), added(undisturbed)


def _served(outcome: Outcome, struck: Struck) -> bool:
    """Whether the process that was struck is one of those that served the request."""
    assert outcome.end is not None
    serve_id = struck.name.rpartition("#")[2]
    return any(name.startswith(serve_id + ".") for name in outcome.end.replicas)


def _overlap(outcome: Outcome, struck: Struck) -> bool:
    return outcome.began_s <= struck.ended_s and struck.began_s <= outcome.ended_s


def _sort(outcome: Outcome) -> tuple[int, bool]:
    """Requests of one sort take about as long as each other."""
    return len(outcome.ask.right.tokens) // 32, outcome.ask.stream


def summary(outcomes: Sequence[Outcome], struck: Sequence[Struck], left: str) -> dict[str, Any]:
    """All figures of one phase; `left` says what was left over at its end, or nothing."""
    verdicts = Counter(outcome.verdict() for outcome in outcomes)
    hit, calm = added_latency(outcomes, struck)
    silences = silence_by_cause(outcomes, struck)
    return {
        "requests": len(outcomes),
        "tokens": sum(len(outcome.tokens) for outcome in outcomes),
        "verdicts": {verdict.value: verdicts[verdict] for verdict in Verdict},
        "recovered": sum(bool(one.end and one.end.recovered) for one in outcomes),
        "kills": {kind.value: sum(one.kind is kind for one in struck) for kind in Kind},
        "longest_silence_s": max(silences.values(), default=0.0),
        "silence_by_cause_s": silences,
        "added_latency": {"replica_killed": vars(hit), "undisturbed": vars(calm)},
        "left_over": left,
        "slowest": [one.sentence() for one in sorted(outcomes, key=lambda one: -one.total_s)[:5]],
        "bad": [one.sentence() for one in outcomes if one.verdict() not in GOOD][:20],
    }


def is_clean(figures: dict[str, Any]) -> bool:
    """Nothing lost, doubled, wrong or left over."""
    verdicts = figures["verdicts"]
    bad = [verdict.value for verdict in Verdict if verdict not in GOOD]
    return not any(verdicts[name] for name in bad) and not figures["left_over"]


def sentences(figures: dict[str, Any]) -> str:
    """For people."""
    hit = figures["added_latency"]["replica_killed"]
    calm = figures["added_latency"]["undisturbed"]
    silences = ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in figures["silence_by_cause_s"].items()
    )
    lines = [
        f"{figures['requests']} requests, {figures['tokens']} tokens: "
        + ", ".join(f"{count} {name}" for name, count in figures["verdicts"].items()),
        "kills: " + ", ".join(f"{count} {name}" for name, count in figures["kills"].items()),
        f"longest silence of a stream: {figures['longest_silence_s']:.2f} s "
        f"(by what happened then, in s: {silences})",
        f"added latency, replica killed: p50 {hit['p50_s']:.2f} s, p99 {hit['p99_s']:.2f} s over "
        f"{hit['requests']} requests; undisturbed: p50 {calm['p50_s']:.2f} s, "
        f"p99 {calm['p99_s']:.2f} s over {calm['requests']}",
        f"left over at the end: {figures['left_over'] or 'nothing'}",
    ]
    return "\n".join([*lines, *figures["bad"]])
