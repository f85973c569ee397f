"""Proves that each change that is drawn makes another module, which Python can read, and that what
no test should see is left out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.changes import TUNED, changed, core_modules, sites

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
    if a < 6 and not b:
        raise ValueError(f"{a + 7}")
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


def test_each_tuned_number_is_one_of_the_core() -> None:
    text = "".join((ROOT / path).read_text() for path in core_modules(ROOT))
    for reason, names in TUNED.items():
        for name in names.split():
            assert f"\n{name} = " in text, f"{name} ({reason})"
