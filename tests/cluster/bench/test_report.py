"""Proves: the figures of a benchmark are those computed by hand; its page is well-formed, loads
nothing, runs nothing, and says what they say."""

from __future__ import annotations

import html
import json
import re

import pytest

from cluster.bench.figures import Record, summarise, timeline
from cluster.bench.report import SCHEMA, VERSION, Report, to_html, to_json


def served() -> list[Record]:
    """Two that were served, one late by the driver's fault, and one that failed."""
    return [
        Record(0, 0.0, 0.0, 10, [(0.5, 1), (1.0, 4), (1.5, 3)], 1.5, "", 4, 16, 6, (3, 2, 1, 0)),
        Record(1, 1.0, 1.5, 20, [(3.0, 2), (4.0, 2)], 4.0, "", 2, 4, 2, (2,), 1, 16),
        Record(2, 2.0, 2.0, 0, [(2.5, 1)], 3.0, "UNAVAILABLE"),
    ]


def test_the_figures_of_a_run() -> None:
    """Latencies count from the intended arrival; a request that failed counts as failed only."""
    made = summarise(served(), retries=3)
    assert (made.requests, made.failed, made.errors) == (3, 1, {"UNAVAILABLE": 1})
    assert (made.prompt_tokens, made.new_tokens, made.elapsed_s) == (30, 12, 4.0)
    assert (made.tokens_per_s, made.requests_per_s) == (3.0, 0.5)
    assert (made.retries, made.recovered, made.cached_tokens) == (3, 1, 16)
    assert (made.latency_s.mean, made.latency_s.max, made.late_s.max) == (2.25, 3.0, 0.5)
    assert (made.latency_s.p50, made.latency_s.p90) == pytest.approx((2.25, 2.85))
    assert (made.ttft_s.mean, made.ttft_s.max) == (1.25, 2.0)
    assert made.token_s.mean == pytest.approx((1.0 / 7 + 1.0 / 2) / 2)
    assert (made.gap_s.count, made.gap_s.mean) == (3, pytest.approx(2.0 / 3))
    per_step = (made.acceptance, made.accepted_per_step, made.committed_per_step)
    assert per_step == pytest.approx((8 / 20, 8 / 6, 12 / 6))
    assert made.accepted_at == pytest.approx((5 / 6, 2 / 6, 1 / 6))
    assert timeline(served(), 4.0, 4) == [1.0, 7.0, 1.0, 4.0]


def test_a_run_without_requests_has_no_figures() -> None:
    made = summarise([])
    assert (made.requests, made.tokens_per_s, made.requests_per_s) == (0, 0.0, 0.0)
    assert made.latency_s is made.acceptance is made.committed_per_step is None
    assert timeline([], 0.0, 3) == [0.0, 0.0, 0.0]


# --------------------------------------------------------------------------- report


def report(*records: Record) -> Report:
    """Of those that `served` has, unless others are given."""
    made = records or tuple(served())
    settings = {"prompts": "3, of <mine> & yours", "arrivals": "closed loop", "requests": 3}
    return Report("2030-01-01", settings, {"cores": 2}, summarise(made, retries=3), made)


def tags_and_texts(page: str) -> tuple[set[str], list[str]]:
    texts = [html.unescape(text).strip() for text in re.split(r"<[^>]*>", page)]
    return set(re.findall(r"<(\w+)", page)), texts


def test_the_page_needs_nothing_from_outside() -> None:
    page = to_html(report())
    tags, texts = tags_and_texts(page)
    assert not {"script", "link", "img", "iframe", "object"} & tags
    assert not re.search(r"\b(src|onload|onclick)=", page)
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    # A plot refers to its own parts.
    assert set(re.findall(r'(?:url\(|href=")(.)', page)) == {"#"}
    assert "color-scheme: light dark" in page
    for expected in (
        *("3, of <mine> & yours", "3", "1 (UNAVAILABLE 1)", "20, 40.0%", "3.33", "2250", "1250"),
        *("Throughput over time", "Time to first token", "Acceptance by position"),
    ):
        assert expected in texts, expected


def test_a_run_in_which_all_failed_still_has_a_page() -> None:
    _, texts = tags_and_texts(to_html(report(*(run for run in served() if run.error))))
    assert "1 (UNAVAILABLE 1)" in texts
    assert not re.search("nan|inf[^o]", "".join(texts))


def test_the_json_holds_the_same_with_its_schema() -> None:
    data = json.loads(to_json(report()))
    assert (data["schema"], data["version"]) == (SCHEMA, VERSION)
    assert data["figures"]["latency_s"]["mean"] == 2.25
    assert data["figures"]["drafted_per_step"] == pytest.approx(20 / 6)
    assert [each["error"] for each in data["requests"]] == ["", "", "UNAVAILABLE"]
    assert [each["latency_s"] for each in data["requests"]] == [1.5, 3.0, 1.0]
    assert sum(data["timeline"]["tokens_per_s"]) * data["timeline"]["bin_s"] == pytest.approx(13)
