"""A run's report as one HTML page: no script, nothing loaded, light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.bench.figures import first_token_times, latencies
from cluster.bench.plots import Plot, columns, line, to_svg
from cluster.bench.report import Report, Table, load_tables

_TEMPLATE = Path(__file__).with_name("page.html")


def to_html(report: Report) -> str:
    """The page. Raises ImportError without matplotlib."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        plots=to_svg(_plots(report)),
        load=load_tables(report),
        settings=Table("Settings", (), _words(report.settings)),
        machine=Table("Machine that sent the load", (), _words(report.machine)),
    )


def _plots(report: Report) -> list[list[Plot]]:
    speed = [((n + 0.5) * report.bin_s, value) for n, value in enumerate(report.timeline)]
    accepted = [100 * share for share in report.summary.accepted_at]
    return [
        [
            _waited(latencies(report.records), "Latency"),
            line(speed, "Throughput over time", "s", "tokens/s"),
        ],
        [
            _waited(first_token_times(report.records), "Time to first token"),
            columns(accepted, "Acceptance by position", "draft token", "% of steps", 100),
        ],
    ]


def _waited(times_s: list[float], title: str) -> Plot:
    """The share of requests that took at most so long."""
    steps = [
        (value, 100 * (n + up) / len(times_s))
        for n, value in enumerate(sorted(times_s))
        for up in (0, 1)
    ]
    return line([(0, 0), *steps], title, "s, at most", "% of requests", 100)


def _words(rows: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, "-" if value is None else str(value)) for name, value in rows.items()]
