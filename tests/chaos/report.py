"""What a run of chaos amounts to, in counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.chaos.kills import Kind
from tests.chaos.load import GOOD, Outcome, Verdict, longest_silence_s


def summary(outcomes: Sequence[Outcome], struck: Counter[Kind], left: str) -> dict[str, Any]:
    """All figures of one phase; `left` says what was left over at its end, or nothing."""
    verdicts = Counter(outcome.verdict() for outcome in outcomes)
    return {
        "requests": len(outcomes),
        "tokens": sum(len(outcome.tokens) for outcome in outcomes),
        "verdicts": {verdict.value: verdicts[verdict] for verdict in Verdict},
        "recovered": sum(bool(one.end and one.end.recovered) for one in outcomes),
        "kills": {kind.value: struck[kind] for kind in Kind},
        "longest_silence_s": longest_silence_s(outcomes),
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
    lines = [
        f"{figures['requests']} requests, {figures['tokens']} tokens: "
        + ", ".join(f"{count} {name}" for name, count in figures["verdicts"].items()),
        "kills: " + ", ".join(f"{count} {name}" for name, count in figures["kills"].items()),
        f"longest silence of a stream: {figures['longest_silence_s']:.2f} s",
        f"left over at the end: {figures['left_over'] or 'nothing'}",
    ]
    return "\n".join([*lines, *figures["bad"]])
