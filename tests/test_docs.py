"""Proves: every link between our pages leads to a file and a heading that are there, and every file
that a page names by its whole path exists. CONTRIBUTING's map names every part of the floors and
every folder of tests. Files and folders are as small as it says."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = "benchmarks|cluster|lockstep|protos|replicas|scheduler|tests"
FOLDERS = "benchmarks|cluster|deploy|docs|protos|replicas|scheduler|tests"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*/*.md")])


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_by_their_whole_path_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_map_names_every_part() -> None:
    named = re.findall(r"`([\w./]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    for floor in ("scheduler", "replicas", "cluster", "tests"):
        prefix = "tests/" if floor == "tests" else ""
        modules = [] if floor == "tests" else (ROOT / floor).glob("[!_]*.py")
        folders = (path.parent for path in (ROOT / floor).glob("*/__init__.py"))
        parts = {prefix + path.name for path in modules}
        parts |= {f"{prefix}{path.name}" + ("" if prefix else "/") for path in folders}
        assert len(parts) > 10
        assert parts - set(named) == set(), floor


def test_files_and_folders_are_small() -> None:
    """About 350 lines, of tests 500, and twelve modules beside fixtures and the `__init__`."""
    modules = [
        path
        for folder in CODE.split("|")
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    ]
    assert len(modules) > 400
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules}
    for path, count in lines.items():
        assert count <= (500 if path.startswith("tests") else 370), path
    counted = Counter(
        str(path.parent.relative_to(ROOT))
        for path in modules
        if path.name not in ("__init__.py", "conftest.py")
    )
    assert {folder: count for folder, count in counted.items() if count > 12} == {}
