"""Proves: the page is well-formed, loads nothing, runs nothing, and says what the figures say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cluster.bench.compare import Comparison, Contender, Ratio
from cluster.bench.figures import PoolSums, summarise
from cluster.bench.page import to_html
from cluster.bench.plots import bars, columns, line, to_svg
from cluster.bench.report import SCHEMA, VERSION, Report, to_json, write_each
from tests.cluster.bench.test_figures import NOTHING, served

VOID = {"meta"}
COMPARISON = Comparison(
    prompts=4,
    new_tokens=16,
    rounds=2,
    assistance="8 tokens, constant",
    contenders=(
        Contender("Lockstep, batch 8", 4, (1201.0, 1403.0), 4),
        Contender("transformers generate, batch 8", 4, (600.0, 701.0), 3),
        Contender("continuous", 4, (), 0, "RuntimeError: no <flash> attention"),
    ),
    ratios=(Ratio("Lockstep over transformers", (2.0, 2.5)),),
)


class Page(HTMLParser):
    """Tags must nest; texts and attributes are kept."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def report(comparison: Comparison | None = COMPARISON) -> Report:
    records = served()
    summary = summarise(records, NOTHING, PoolSums(4, 12, 950, 1000), retries=3)
    settings = {"prompts": "3, of <mine> & yours", "arrivals": "closed loop", "requests": 3}
    return Report("2030-01-01", settings, {"cores": 2}, summary, tuple(records), comparison)


def test_the_page_nests_and_needs_nothing_from_outside() -> None:
    text = to_html(report())
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in page.attributes}
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    # A plot refers to its own parts.
    assert set(re.findall(r'(?:url\(|href=")(.)', text)) == {"#"}
    assert "color-scheme: light dark" in text


def test_the_page_holds_the_figures() -> None:
    texts = Page(to_html(report())).texts
    assert "3, of <mine> & yours" in texts
    for expected in (
        *("3", "1 (UNAVAILABLE 1)", "5.0%", "20, 40.0%", "3.33", "2250", "1250"),
        *("1302", "650", "2.25", "2.00, 2.50", "RuntimeError: no <flash> attention", "4"),
    ):
        assert expected in texts, expected


def test_the_page_draws_a_plot_for_each_view() -> None:
    titles = {"Throughput over time", "Time to first token", "Acceptance by position"}
    assert titles <= {text.strip() for text in Page(to_html(report(None))).texts}
    assert Page(to_html(report())).tags.count("svg") == 2


def test_a_run_in_which_all_failed_still_has_a_page() -> None:
    records = tuple(record for record in served() if record.error)
    made = Report(
        "2030-01-01", {"prompts": "1", "arrivals": "x"}, {}, summarise(records, NOTHING, NOTHING),
        records,
    )  # fmt: skip
    page = Page(to_html(made))
    assert page.open == []
    assert "1 (UNAVAILABLE 1)" in page.texts
    assert not re.search("nan|inf[^o]", "".join(page.texts))


def test_what_is_missing_is_said_in_both() -> None:
    made = replace(report(None), notes=("no <spread>",), not_compared="RuntimeError: [no] memory")
    texts = Page(to_html(made)).texts
    assert {"no <spread>", "There is none: RuntimeError: [no] memory"} <= set(texts)
    data = json.loads(to_json(made))
    assert (data["notes"], data["not_compared"]) == (["no <spread>"], "RuntimeError: [no] memory")
    left_out = replace(COMPARISON, left_out="1 of 5 prompts are not compared: too long")
    assert "1 of 5 prompts" in "".join(Page(to_html(report(left_out))).texts)
    assert json.loads(to_json(report(left_out)))["comparison"]["left_out"] == left_out.left_out


def test_the_json_holds_the_same_with_its_schema() -> None:
    data = json.loads(to_json(report()))
    assert (data["schema"], data["version"]) == (SCHEMA, VERSION)
    assert data["figures"]["latency_s"]["mean"] == 2.25
    assert data["figures"]["drafted_per_step"] == pytest.approx(20 / 6)
    assert data["figures"]["padding"] == pytest.approx(0.05)
    assert [each["error"] for each in data["requests"]] == ["", "", "UNAVAILABLE"]
    assert [each["latency_s"] for each in data["requests"]] == [1.5, 3.0, 1.0]
    assert data["comparison"]["contenders"][0]["median"] == 1302.0
    assert data["comparison"]["contenders"][2]["median"] is None
    assert data["comparison"]["ratios"][0]["median"] == 2.25
    assert sum(data["timeline"]["tokens_per_s"]) * data["timeline"]["bin_s"] == pytest.approx(13)


def test_a_file_that_fails_costs_no_other(tmp_path: Path) -> None:
    def fails(_report: object) -> str:
        raise ImportError("no such module")

    fine = tmp_path / "a.json"
    wrong = write_each(report(), [(tmp_path, to_json), (tmp_path / "b", fails), (fine, to_json)])
    assert [f"{tmp_path} was not" in wrong[0], "no such module" in wrong[1]] == [True, True]
    assert len(wrong) == 2
    assert fine.read_text() == to_json(report())


def test_a_picture_is_one_svg_with_its_words_and_the_same_each_time() -> None:
    plots = [
        [line([(0, 0), (1, 2)], "a <line>", "x", "y"), columns([], "columns", "x", "y", 1.0)],
        [bars([("ours", 100.0, True), ("other", 25.0, False)], "bars")],
    ]
    drawn = to_svg(plots)
    assert drawn == to_svg(plots)
    words = {text.strip() for text in ElementTree.fromstring(drawn).itertext()}
    assert {"a <line>", "columns", "ours", "100", "25"} <= words
