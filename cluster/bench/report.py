"""A run's report: as JSON, and as tables for the terminal and the page.

The schema of the JSON has a version; a field is never reused.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster.bench.compare import Comparison
from cluster.bench.figures import Record, Summary, timeline

SCHEMA = "lockstep-bench"
VERSION = 1
"""Raised when a field changes its meaning or goes; a new field leaves it as it is."""
BINS_MAX = 60
"""Most parts of the timeline; none is shorter than BIN_S but in runs of a few seconds."""
BINS_MIN = 8
BIN_S = 0.5


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
    comparison: Comparison | None = None
    not_compared: str = ""
    """Why there is no comparison though one was asked for."""
    servers: Mapping[str, Summary] = field(default_factory=dict)
    """Where several were asked: the figures of each, the first one's included."""
    notes: tuple[str, ...] = ()
    """What is missing from the figures of the load, and why, and whose they are; sentences for
    people."""

    @property
    def bin_s(self) -> float:
        """Length of a part of the timeline."""
        elapsed_s = self.summary.elapsed_s
        return elapsed_s / min(max(int(elapsed_s / BIN_S), BINS_MIN), BINS_MAX)

    @property
    def timeline(self) -> list[float]:
        """Tokens/s in equal parts of the run."""
        elapsed_s = self.summary.elapsed_s
        bins = round(elapsed_s / self.bin_s) if elapsed_s else 0
        return timeline(self.records, elapsed_s, bins)


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
        "comparison": None if report.comparison is None else _comparison(report.comparison),
        "not_compared": report.not_compared,
        "servers": {name: asdict(each) for name, each in report.servers.items()},
        "notes": list(report.notes),
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


def _comparison(comparison: Comparison) -> dict[str, Any]:
    data = asdict(comparison)
    for ratio, plain in zip(comparison.ratios, data["ratios"], strict=True):
        plain["median"] = ratio.median
    for contender, plain in zip(comparison.contenders, data["contenders"], strict=True):
        plain["median"] = contender.speed if contender.tokens_per_s else None
    return data


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
        "calls asked again by the client": str(f.retries),
        "requests that lost their place and were taken up again": str(f.recovered),
        "prompt tokens, of which found in a prefix cache": f"{f.prompt_tokens}, {f.cached_tokens}",
        "new tokens": str(f.new_tokens),
        "draft tokens, of which accepted": f"{f.draft_tokens}, {percent(f.acceptance)}",
        "drafted per row and step": number(f.drafted_per_step),
        "accepted per row and step": number(f.accepted_per_step),
        "committed per row and step": number(f.committed_per_step),
        "accepted by position": " ".join(map(percent, f.accepted_at)) or "-",
        "spread of a batch in tokens, mean": number(f.spread_mean),
        "padding: KV positions read beyond a row's own": percent(f.padding),
    }
    several = [_servers(report.servers)] if report.servers else []
    header = ("milliseconds", "mean", "p50", "p90", "p95", "p99", "most")
    return [
        Table("Times", header, shown),
        Table("Speculation, batches, failures", (), list(counts.items())),
        *several,
    ]


def _servers(servers: Mapping[str, Summary]) -> Table:
    """Side by side, a column each."""
    rows: dict[str, list[str]] = {}
    for f in servers.values():
        rows.setdefault("tokens/s", []).append(number(f.tokens_per_s))
        rows.setdefault("requests/s", []).append(number(f.requests_per_s))
        rows.setdefault("failed", []).append(f"{f.failed} of {f.requests}")
        for name, times in (
            ("time to first token", f.ttft_s),
            ("time per output token", f.token_s),
            ("latency", f.latency_s),
        ):
            for share in ("p50", "p90", "p99"):
                shown = "-" if times is None else number(1000 * getattr(times, share))
                rows.setdefault(f"{name}, {share}, ms", []).append(shown)
    listed = [(name, *values) for name, values in rows.items()]
    return Table("Servers", ("", *servers), listed)


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Each way, and the ratios between them."""
    speeds = [
        (
            way.name,
            number(way.speed) if way.tokens_per_s else "-",
            way.does_not_run or ", ".join(f"{value:.0f}" for value in way.tokens_per_s),
            str(way.identical) if way.tokens_per_s else "-",
        )
        for way in comparison.contenders
    ]
    ratios = [
        (each.name, f"{each.median:.2f}", ", ".join(f"{value:.2f}" for value in each.values))
        for each in comparison.ratios
    ]
    identical = f"identical of {comparison.prompts}"
    return [
        Table("Comparison", ("tokens/s", "median", "each round", identical), speeds),
        Table("Ratios within a round", ("ratio", "median", "each round"), ratios),
    ]


def number(value: float | None) -> str:
    """Three digits at least, "-" for what is not known."""
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def percent(share: float | None) -> str:
    """With one decimal, "-" for what is not known."""
    return "-" if share is None else f"{share:.1%}"


# --------------------------------------------------------------------------- files, machine


def write_each(
    report: Report, outputs: Sequence[tuple[Path, Callable[[Report], str]]]
) -> list[str]:
    """Write all files that can be written; what is wrong with the others, a sentence for each."""
    wrong = []
    for path, text in outputs:
        try:
            path.write_text(text(report), encoding="utf-8")
        except (ImportError, OSError, ValueError) as error:
            wrong.append(f"{path} was not written: {error}")
    return wrong


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
