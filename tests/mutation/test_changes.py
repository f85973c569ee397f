"""Proves that each change that is drawn makes another module, which Python can read, and that what
no test should see is left out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.changes import TUNED, changed, core_modules, sites
from tests.mutation.lines import TestsByLine

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", core_modules(ROOT))
def test_a_change_makes_another_module(path: str) -> None:
    """Of every twentieth place: to read a module takes a while."""
    source = (ROOT / path).read_text()
    before = ast.dump(ast.parse(source))
    for site in sites(path, source)[::20]:
        for text in site.texts:
            assert ast.dump(ast.parse(changed(source, site, text))) != before, (site, text)


def test_places_are_found_by_kind_and_messages_are_none() -> None:
    source = """
def f(a: int = 1) -> int:
    '''Says 2.'''
    assert a < 3, "not 4"
    _log.info(5)
    g()
    b = h(a, dim=5, sorted=True) >= LAG
    if a < 6 and not b:
        raise ValueError(f"{a + 7}")
    if not a.is_cpu:
        return a - 9
    for _ in zip(a, a, strict=True):
        return min(a, 8)
"""
    found = {source[site.begin : site.end]: site.texts for site in sites("f.py", source)}
    assert found == {
        "1": ("2", "0"),
        "g()": ("pass",),
        "a < 6 and not b": ("(not (a < 6 and (not b)))", "True", "False", "(a < 6 or not b)"),
        "a < 6": ("(a <= 6)",),
        "6": ("7", "5", "12", "3"),
        "not b": ("(b)",),
        "return min(a, 8)": ("return None",),
        "min": ("max",),
        "8": ("9", "7", "16", "4"),
    }


def test_a_place_knows_the_lines_that_run_with_it() -> None:
    source = """
LIMIT = 1
def f(a=2):
    if (
        a < 3
    ):
        return [
            4
        ]
"""
    found = {source[site.begin : site.end]: site for site in sites("f.py", source)}
    assert [(found[text].lines, found[text].at_import) for text in ("1", "2", "3", "4")] == [
        (range(2, 3), True),
        (range(3, 4), True),
        (range(4, 7), False),
        (range(7, 10), False),
    ]


def test_tests_of_a_line_come_file_by_file_the_quickest_first() -> None:
    names = ("a.py::slow", "b.py::one", "a.py::quick", "b.py::two")
    known = TestsByLine(names, (9.0, 1.0, 0.1, 1.0), {"f.py": {3: [0, 1], 4: [2], 9: [3]}})
    assert known.of("f.py", range(3, 5)) == ["b.py::one", "a.py::slow", "a.py::quick"]
    assert known.of("f.py", range(5, 9)) == known.of("g.py", range(3, 5)) == []


def test_each_tuned_number_is_one_of_the_core() -> None:
    text = "".join((ROOT / path).read_text() for path in core_modules(ROOT))
    for reason, names in TUNED.items():
        for name in names.split():
            assert f"\n{name} = " in text, f"{name} ({reason})"
