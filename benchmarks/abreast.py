"""Ways to generate side by side, a few batches at a time: for ratios that noise does not drown.

A shared machine's speed changes within seconds, and one run after the other meets different ones.
Here all ways begin together and take turns after a fraction of a second each, so that all meet the
same machine; the time that counts is each way's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.measured import MeasuredWay
from cluster.bench.compare import Contender
from scheduler.messages import Request

SLICE_S = 0.1
"""One turn: some steps, and short against the machine's moods."""


def abreast(
    ways: Mapping[str, MeasuredWay],
    requests: Sequence[Request],
    rounds: int,
    expected: Sequence[Sequence[int]],
    counts: Mapping[str, int] | None = None,
    slice_s: float = SLICE_S,
) -> tuple[Contender, ...]:
    """Run every way once per round, all at the same time, and compare the outputs with `expected`.

    Arguments and result are those of `cluster.bench.compare.take_turns`. The ways may share a
    replica: each has its own sequences there. Its KV blocks have to last for all of them.
    """
    asked = {name: requests[: (counts or {}).get(name, len(requests))] for name in ways}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    same = {name: [True] * len(asked[name]) for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            way.begin(
                [
                    replace(each, id=f"{name}: {each.id}", cache_salt=f"{name}, round {number}")
                    for each in asked[name]
                ]
            )
        _run_together(ways, slice_s, backwards=bool(number % 2))
        for name, way in ways.items():
            outputs = [output.tokens for output in way.outputs]
            speeds[name].append(sum(map(len, outputs)) / way.seconds)
            for index, (got, wanted) in enumerate(zip(outputs, expected, strict=False)):
                same[name][index] &= got == list(wanted)
    return tuple(
        Contender(name, len(asked[name]), tuple(speeds[name]), sum(same[name])) for name in ways
    )


def _run_together(ways: Mapping[str, MeasuredWay], slice_s: float, backwards: bool) -> None:
    """To the end of all; every other turn is in reverse, so that none always follows another."""
    running = dict(ways)
    while running:
        for name in reversed(list(running)) if backwards else list(running):
            way = running[name]
            end_s = way.seconds + slice_s
            while way.seconds < end_s:
                if not way.advance():
                    del running[name]
                    break
        backwards = not backwards
