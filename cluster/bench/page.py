"""A run's report as one HTML page: no script, nothing loaded, light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.bench.figures import first_token_times, latencies
from cluster.bench.plots import Plot, columns, histogram, line, to_svg
from cluster.bench.report import Report, Table, load_tables, number, percent

_TEMPLATE = Path(__file__).with_name("page.html")


def to_html(report: Report) -> str:
    """The page. Raises ImportError without matplotlib."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        tiles=_tiles(report),
        plots=to_svg(_plots(report)),
        load=load_tables(report),
        settings=Table("Settings", (), _words(report.settings)),
        machine=Table("Machine that sent the load", (), _words(report.machine)),
    )


def _tiles(report: Report) -> list[tuple[str, str]]:
    f = report.summary

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{number(1000 * seconds)} ms"

    return [
        ("tokens/s", number(f.tokens_per_s)),
        ("requests/s", number(f.requests_per_s)),
        ("first token, p50", ms(f.ttft_s.p50 if f.ttft_s else None)),
        ("first token, p99", ms(f.ttft_s.p99 if f.ttft_s else None)),
        ("per output token, p50", ms(f.token_s.p50 if f.token_s else None)),
        ("of draft tokens accepted", percent(f.acceptance)),
        ("tokens per row and step", number(f.committed_per_step)),
    ]


def _plots(report: Report) -> list[list[Plot]]:
    waited = sorted(latencies(report.records))
    steps = [
        (value, 100 * (n + up) / len(waited)) for n, value in enumerate(waited) for up in (0, 1)
    ]
    speed = [((n + 0.5) * report.bin_s, value) for n, value in enumerate(report.timeline)]
    times = [1000 * value for value in first_token_times(report.records)]
    bins = min(max(math.ceil(2 * math.sqrt(len(times))), 5), 24)
    accepted = [100 * share for share in report.summary.accepted_at]
    return [
        [
            line([(0, 0), *steps], "Latency: requests that took at most so long", "s", "%", 100),
            line(speed, "Throughput over time", "s", "tokens/s"),
        ],
        [
            histogram(times, bins, "Time to first token", "ms", "requests"),
            columns(accepted, "Acceptance by position", "draft token", "% of steps", 100),
        ],
    ]


def _words(rows: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, "-" if value is None else str(value)) for name, value in rows.items()]
