"""What `lockstep simulate` runs and writes: experiments side by side, as JSON and as a picture.

Knows no options and no console; the experiments themselves are in `scheduler.simulation`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

from cluster.bench.figures import Distribution
from cluster.bench.plots import Plot, line, to_svg
from scheduler.config import SchedulerConfig
from scheduler.simulation import Experiment, Figures, Setup, WorkloadRequest

ARRIVAL = "arrival"
"""Rows step in order of arrival, as in EQSPEC (arXiv 2510.22876): never by their lengths."""
GROUPED = "grouped"
"""Rows step in batches of near length, as the config says."""


@dataclass(frozen=True)
class Case:
    """One experiment of several."""

    setup: Setup
    rows: str
    """GROUPED or ARRIVAL."""

    def named(self) -> dict[str, Any]:
        return {
            "replicas": self.setup.replicas,
            "shards": self.setup.shards,
            "rows": self.rows,
            "in_flight": self.setup.in_flight,
        }


@dataclass(frozen=True)
class Result:
    """A case and its figures."""

    case: Case
    figures: Figures

    def summary(self) -> dict[str, Any]:
        """The figures as JSON has them; times in virtual seconds."""
        figures, sums, setup = self.figures, self.figures.sums, self.case.setup
        latency, first, token = (
            Distribution.of(values)
            for values in (figures.latency_s, figures.first_token_s, figures.per_token_s)
        )
        return {
            **self.case.named(),
            "requests": figures.finished + len(figures.refusals),
            "finished": figures.finished,
            "refused": len(figures.refusals),
            "refusal": next(iter(figures.refusals), None),
            "new_tokens": figures.tokens,
            "elapsed_s": figures.elapsed_s,
            "tokens_per_s": figures.tokens_per_s(),
            "utilisation": figures.utilisation(setup.replicas),
            "pool_utilisation": figures.pool_utilisation(setup.shards),
            "latency_s": asdict(latency) if latency else None,
            "ttft_s": asdict(first) if first else None,
            "token_s": asdict(token) if token else None,
            "rows_mean": sums.row_steps / max(sums.steps, 1),
            "spread_mean": sums.spread_mean,
            "tokens_per_row_and_step": figures.tokens / max(sums.row_steps, 1),
            "waiting_most": figures.waiting_most,
            "batches": sums.batches,
        }


def cases(
    base: Setup, replicas: Sequence[int], shards: Sequence[int], baseline: bool, per_replica: bool
) -> list[Case]:
    """Every number of replicas with every number of shards, and the baseline beside each.

    `per_replica`: a closed loop's requests in flight are for each replica.
    """
    made = []
    for count in replicas:
        for number in shards:
            in_flight = base.in_flight
            if in_flight is not None and per_replica:
                in_flight *= count
            for rows in (GROUPED, ARRIVAL) if baseline else (GROUPED,):
                config = base.config if rows == GROUPED else in_order_of_arrival(base.config)
                setup = replace(base, replicas=count, shards=number, in_flight=in_flight)
                made.append(Case(replace(setup, config=config), rows))
    return made


def in_order_of_arrival(config: SchedulerConfig) -> SchedulerConfig:
    """The same but for the choice of rows."""
    return config.model_copy(update={"wait_rounds": 1})


def run(case: Case, requests: Sequence[WorkloadRequest], seed: int) -> Result:
    """Runs one experiment."""
    return Result(case, Experiment(case.setup, requests, Random(f"{seed}/study")).run())


def to_json(described: dict[str, Any], results: Sequence[Result]) -> str:
    """What was asked, then for each case its summary and its pools over time."""
    report = {
        "simulated": described,
        "cases": [
            {
                **_rounded(result.summary()),
                "over_time": [_rounded(asdict(one)) for one in result.figures.samples],
            }
            for result in results
        ],
    }
    text = json.dumps(report, separators=(",", ":"), default=str)
    return text.replace('{"replicas"', '\n{"replicas"') + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def picture(results: Sequence[Result]) -> str:
    """For each case a row of plots: what waits, what works, and how long requests took. Above them,
    where the number of replicas varies, throughput over it, one plot per number of shards.

    As SVG text. Raises ImportError without matplotlib.
    """
    overview = _overview(results)
    return to_svg([*([overview] if overview else []), *map(_plots, results)])


def _overview(results: Sequence[Result]) -> list[Plot]:
    """For each way that was tried with several numbers of replicas."""
    series: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        setup = result.case.setup
        name = f"{setup.shards} pool{'s' * (setup.shards > 1)}, rows {result.case.rows}"
        point = (float(setup.replicas), result.figures.tokens_per_s())
        series.setdefault(name, [(0.0, 0.0)]).append(point)
    most = max(rate for points in series.values() for _, rate in points)
    return [
        line(sorted(points), name, "replicas", "tokens/s", 1.05 * most or 1.0)
        for name, points in series.items()
        if len(points) > 2
    ]


def _plots(result: Result) -> list[Plot]:
    figures, setup = result.figures, result.case.setup
    samples = figures.samples
    pairs = [(a, b) for a, b in pairwise(samples) if b.at_s > a.at_s]

    def share(name: str, by: int) -> list[tuple[float, float]]:
        return [
            (b.at_s, 100 * (getattr(b, name) - getattr(a, name)) / (b.at_s - a.at_s) / by)
            for a, b in pairs
        ]

    shards = f", {setup.shards} shards" if setup.shards > 1 else ""
    title = f"{setup.replicas} replicas{shards}, rows {result.case.rows}: requests that wait"
    plots = [
        line([(one.at_s, one.waiting) for one in samples], title, "s", "requests"),
        line(share("busy_s", setup.replicas), "Replicas' time at work", "s", "%", 100),
    ]
    if setup.pool_batch_s:
        busy = share("pool_busy_s", setup.shards)
        plots.append(line(busy, "Pools' time at work", "s", "%", 100))
    if figures.latency_s:
        import numpy  # it takes a while, and --help should not wait

        points = numpy.percentile(figures.latency_s, range(101))
        cdf = [(float(at_s), float(share)) for share, at_s in enumerate(points)]
        plots.append(line(cdf, "Requests that took at most so long", "s", "%", 100))
    return plots
