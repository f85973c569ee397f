"""Proves: the page is well-formed, loads nothing, runs nothing, and says what the figures say."""

from __future__ import annotations

import html
import json
import re
from xml.etree import ElementTree

import pytest

from cluster.bench.figures import Record, summarise
from cluster.bench.plots import columns, line, to_svg
from cluster.bench.report import SCHEMA, VERSION, Report, to_html, to_json
from tests.cluster.bench.test_figures import served


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
    _, texts = tags_and_texts(to_html(report(*(one for one in served() if one.error))))
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


def test_a_picture_is_one_svg_with_its_words_and_the_same_each_time() -> None:
    plots = [
        [line([(0, 0), (1, 2)], "a <line>", "x", "y"), columns([], "columns", "x", "y", 1.0)],
        [columns([1.0, 2.0], "more", "x", "y", 2.0)],
    ]
    drawn = to_svg(plots)
    assert drawn == to_svg(plots)
    words = {text.strip() for text in ElementTree.fromstring(drawn).itertext()}
    assert {"a <line>", "columns", "more"} <= words
