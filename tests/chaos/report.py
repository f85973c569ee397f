"""What a run of chaos amounts to: counts, and the silences that its strikes cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tests.chaos.kills import Kind, Struck
from tests.chaos.load import GOOD, Outcome, Verdict

_AFTERMATH_S = 1.0
"""A silence belongs to the strikes within it or so shortly before it."""


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


def summary(outcomes: Sequence[Outcome], struck: Sequence[Struck], left: str) -> dict[str, Any]:
    """All figures of one phase; `left` says what was left over at its end, or nothing."""
    verdicts = Counter(outcome.verdict() for outcome in outcomes)
    silences = silence_by_cause(outcomes, struck)
    return {
        "requests": len(outcomes),
        "tokens": sum(len(outcome.tokens) for outcome in outcomes),
        "verdicts": {verdict.value: verdicts[verdict] for verdict in Verdict},
        "recovered": sum(bool(one.end and one.end.recovered) for one in outcomes),
        "kills": {kind.value: sum(one.kind is kind for one in struck) for kind in Kind},
        "longest_silence_s": max(silences.values(), default=0.0),
        "silence_by_cause_s": silences,
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
    silences = ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in figures["silence_by_cause_s"].items()
    )
    lines = [
        f"{figures['requests']} requests, {figures['tokens']} tokens: "
        + ", ".join(f"{count} {name}" for name, count in figures["verdicts"].items()),
        "kills: " + ", ".join(f"{count} {name}" for name, count in figures["kills"].items()),
        f"longest silence of a stream: {figures['longest_silence_s']:.2f} s "
        f"(by what happened then, in s: {silences})",
        f"left over at the end: {figures['left_over'] or 'nothing'}",
    ]
    return "\n".join([*lines, *figures["bad"]])
