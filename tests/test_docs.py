"""Proves: every link between our pages leads to a file and a heading that are there. Every file
that a page names by its whole path exists and has the names that the page places there; so does
every module, target of `make` and flag of a `lockstep` command that a page uses. CONTRIBUTING's map
names every part of the floors and every folder of tests. Files and folders are as small as it
says."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = "benchmarks|cluster|lockstep|protos|replicas|scheduler|tests"
FOLDERS = "benchmarks|cluster|deploy|docs|protos|replicas|scheduler|tests"
HELPS = ROOT / "tests" / "cluster" / "cli" / "golden"
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


def names_in_files(page: str) -> list[tuple[str, str]]:
    """As "`name` in `path`" and "`path` (`name`, ...)" say them: names with their files."""
    path = rf"`((?:{FOLDERS})/[\w./]+\.py)`"
    listed = re.findall(rf"((?:`[\w.]+`(?:, | and | or )?)+)(?: \([^()]*\))? in {path}", page)
    listed += [(names, path) for path, names in re.findall(rf"{path} \((`[^()]*)\)", page)]
    return [
        (name, path)
        for names, path in listed
        for name in re.findall(r"`([\w.]+)`", names)
        if not name.endswith(".py")
    ]


def test_names_that_a_page_places_in_a_file_are_there() -> None:
    named = [
        (page.name, name, path) for page in PAGES for name, path in names_in_files(page.read_text())
    ]
    assert len(named) > 100
    for page, name, path in named:
        last = name.rpartition(".")[2]
        assert re.search(rf"\b{last}\b", (ROOT / path).read_text()), f"{page}: {name} in {path}"


def test_modules_and_targets_that_a_page_runs_are_there() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    modules = set(re.findall(rf"python -m ((?:{CODE})\.[\w.]*\w)", pages)) - {"benchmarks.NAME"}
    targets = set(re.findall(r"[`\n]make ([a-z][\w-]*)", pages))
    assert len(modules) > 10
    assert len(targets) > 10
    for module in modules:
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module
    made = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets - set(made) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_a_page_have_the_flags_that_it_gives_them(page: Path) -> None:
    """By the golden helps, which `tests/cluster/cli/test_help.py` holds to the commands."""
    helps = {path.stem.replace("_", " "): path.read_text() for path in HELPS.glob("*.txt")}
    said = re.findall(r"[`\n /]lockstep ((?:keys )?[a-z][\w-]*)([^`\n#|;&]*)", page.read_text())
    for command, options in said:
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", options):
            known = re.findall(r"(?<![\w-])--[a-z][\w-]*", helps.get(command, flag))
            assert flag in known, f"lockstep {command} {flag}"


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
