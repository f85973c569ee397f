"""A run's report, and its form as JSON. The schema has a version; a field is never reused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
    notes: tuple[str, ...] = ()
    """What is missing from the figures of the load, and why; sentences for people."""

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
