"""A run's report: as JSON, as tables, and as one HTML page: no script, nothing loaded.

The schema of the JSON has a version; a field is never reused.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster.bench.figures import Record, Summary, first_token_times, latencies, timeline
from cluster.bench.plots import Plot, columns, line, to_svg

SCHEMA = "lockstep-bench"
VERSION = 1
"""Raised when a field changes its meaning or goes; a new field leaves it as it is."""
BINS = 40
"""Equal parts of the timeline."""
_TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Report:
    """Everything that is known about a run."""

    created: str
    """ISO 8601, with the time zone."""
    settings: Mapping[str, str | int | float | bool | None]
    machine: Mapping[str, Any]
    """Of the process that sent the load; the cluster may run elsewhere."""
    summary: Summary
    records: tuple[Record, ...]
    """Of the requests that count, in the order of sending."""

    @property
    def bin_s(self) -> float:
        """Length of a part of the timeline."""
        return self.summary.elapsed_s / BINS

    @property
    def timeline(self) -> list[float]:
        """Tokens/s in each part of the run."""
        return timeline(self.records, self.summary.elapsed_s, BINS)


def to_json(report: Report) -> str:
    """Times in seconds."""
    data = {
        "schema": SCHEMA,
        "version": VERSION,
        "created": report.created,
        "machine": dict(report.machine),
        "settings": dict(report.settings),
        "figures": asdict(report.summary),
        "timeline": {"bin_s": report.bin_s, "tokens_per_s": report.timeline},
        "requests": [_request(record) for record in report.records],
    }
    return json.dumps(data, indent=2) + "\n"


def _request(record: Record) -> dict[str, Any]:
    assert record.end_s is not None, "a request has not ended"
    return {
        "due_s": record.due_s,
        "sent_s": record.sent_s,
        "first_token_s": record.chunks[0][0] - record.due_s if record.chunks else None,
        "latency_s": record.end_s - record.due_s,
        "prompt_tokens": record.prompt_tokens,
        "new_tokens": record.new_tokens,
        "steps": record.steps,
        "draft_tokens": record.draft_tokens,
        "accepted_tokens": record.accepted_tokens,
        "error": record.error,
    }


# --------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Table:
    """Figures in words, the name of each row first."""

    title: str
    header: Sequence[str]
    """Empty where a row is a name and a value."""
    rows: Sequence[Sequence[str]]


def load_tables(report: Report) -> list[Table]:
    """Times, and what was counted."""
    f = report.summary
    times = (
        ("time to first token", f.ttft_s),
        ("time per output token", f.token_s),
        ("inter-token latency", f.gap_s),
        ("latency", f.latency_s),
        ("sent after the intended arrival", f.late_s),
    )
    shown = [
        (name, *(number(1000 * x) for x in (d.mean, d.p50, d.p90, d.p95, d.p99, d.max)))
        for name, d in times
        if d is not None
    ]
    errors = ", ".join(f"{code} {count}" for code, count in sorted(f.errors.items()))
    counts = {
        "tokens/s": number(f.tokens_per_s),
        "requests/s": number(f.requests_per_s),
        "requests": f"{f.requests} in {number(f.elapsed_s)} s",
        "failed": f"{f.failed} ({errors})" if errors else "0",
        **{f"the first {code}": words for code, words in sorted(f.said.items())},
        "calls asked again by the client": str(f.retries),
        "requests that lost their place and were taken up again": str(f.recovered),
        "prompt tokens, of which found in a prefix cache": f"{f.prompt_tokens}, {f.cached_tokens}",
        "new tokens": str(f.new_tokens),
        "draft tokens, of which accepted": f"{f.draft_tokens}, {percent(f.acceptance)}",
        "drafted per row and step": number(f.drafted_per_step),
        "accepted per row and step": number(f.accepted_per_step),
        "committed per row and step": number(f.committed_per_step),
        "accepted by position": " ".join(map(percent, f.accepted_at)) or "-",
    }
    header = ("milliseconds", "mean", "p50", "p90", "p95", "p99", "most")
    return [
        Table("Times", header, shown),
        Table("Speculation, failures", (), list(counts.items())),
    ]


def number(value: float | None) -> str:
    """Three digits at least, "-" for what is not known."""
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def percent(share: float | None) -> str:
    """With one decimal, "-" for what is not known."""
    return "-" if share is None else f"{share:.1%}"


# --------------------------------------------------------------------------- page


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


# --------------------------------------------------------------------------- machine


def machine() -> dict[str, Any]:
    """The processor and the versions that decide speed; they stand beside every figure."""
    import torch

    described: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    for package in ("torch", "transformers", "ray", "lockstep"):
        try:
            described[package] = version(package)
        except PackageNotFoundError:
            continue
    return described


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
