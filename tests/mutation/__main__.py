"""Changes one line of the core at a time and says which changes no test sees.

    python -m tests.mutation --seed 1 2 3 --number 30 [--only scheduler/state] [--jobs 2]

It draws places at random, and one change for each, as `changes.py` says; seeds replay them. Each
change is made in a copy of the tree, whose tests must pass without it. The tests that run the
changed line run, the quickest file first, until one fails; of a line that runs at import, all of
its floor. A test that hangs, or takes all memory, has seen the change.

What survives is a property without a test, or a line that nothing needs.
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.changes import Site, changed, core_modules, sites
from tests.mutation.lines import FILE, TestsByLine

ROOT = Path(__file__).parents[2]
ONE_TEST_S = 300
"""A test that takes longer hangs: ten times what the longest takes on a machine that is shared."""
KINDS = "not (ray or slow or clients)"
ALL_TESTS_S = 1800
_OF_THE_CORE = ("sampling", "decoding", "kv_cache", "drafters", "grammars", "cuda")
MEMORY_BYTES = 8 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--number", type=int, default=60, help="changes to draw for each seed")
    parser.add_argument("--only", default="", help="draw from paths that begin so")
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2))
    args = parser.parse_args()
    modules = [path for path in core_modules(ROOT) if path.startswith(args.only)]
    places = [site for path in modules for site in sites(path, (ROOT / path).read_text())]
    drawn = []
    for rng in map(random.Random, args.seed):
        drawn += [(site, rng.choice(site.texts)) for site in rng.sample(places, args.number)]
    seeds = " ".join(map(str, args.seed))
    print(f"{len(drawn)} of {len(places)} places in {len(modules)} modules, seed {seeds}")
    with tempfile.TemporaryDirectory(prefix="lockstep-mutation-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(args.jobs):
            trees.put(_copied(Path(folder) / str(job)))
        known = {
            floor: _unchanged(Path(folder) / "0", floor)
            for floor in sorted({_floor(site) for site, _ in drawn})
        }
        with ThreadPoolExecutor(args.jobs) as pool:
            verdicts = pool.map(
                lambda change: _try(trees, known[_floor(change[0])], *change), drawn
            )
            survivors = sum([_told(number, *verdict) for number, verdict in enumerate(verdicts, 1)])
    print(f"seed {seeds}: found {len(drawn) - survivors} of {len(drawn)}")


def _copied(tree: Path) -> Path:
    """What git knows and what it would add."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # one that was deleted is listed still
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    return tree


def _floor(site: Site) -> str:
    return site.path.split("/")[0]


def _unchanged(tree: Path, floor: str) -> TestsByLine:
    """Runs the floor's tests."""
    file, began = tree / "tests-by-line.json", time.monotonic()
    if failed := _seen(tree, _tests_of(tree, floor), file):
        sys.exit(f"without any change: {failed}")
    known = TestsByLine.read(file)
    print(f"{floor}: {len(known.names)} tests, {time.monotonic() - began:.0f} s", flush=True)
    return known


def _try(
    trees: SimpleQueue[Path], known: TestsByLine, site: Site, text: str
) -> tuple[str, str, float]:
    """The change as a diff, what saw it (empty: no test), and the seconds that this took."""
    tree, began = trees.get(), time.monotonic()
    file = tree / site.path
    source = file.read_text()
    new = changed(source, site, text)
    lines = [text.splitlines(keepends=True) for text in (source, new)]
    diff = "".join(difflib.unified_diff(*lines, site.path, site.path, n=2))
    compiled = Path(cache_from_source(str(file)))
    try:
        file.write_text(new)
        compiled.unlink(missing_ok=True)  # it may be of the same size and second
        tests = known.of(site.path, site.lines)
        if site.at_import:
            tests = _tests_of(tree, _floor(site))
        seen = _seen(tree, tests) if tests else ""
    finally:
        file.write_text(source)
        compiled.unlink(missing_ok=True)
        trees.put(tree)
    return diff, seen, time.monotonic() - began


def _seen(tree: Path, tests: list[str], by_line: Path | None = None) -> str:
    """The first test that fails, in one process with bounds. `by_line`: what to write."""
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-profile", "mutate"]
    options += ["-o", f"faulthandler_timeout={ONE_TEST_S}", "-m", KINDS]
    if by_line is not None:
        options += ["-p", "tests.mutation.lines"]
    named = tree / "tests-to-run.txt"  # thousands are too long for a command
    named.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", *options, f"@{named}"]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), FILE: str(by_line)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    )
    try:
        out, _ = process.communicate(timeout=ALL_TESTS_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"a hang: more than {ALL_TESTS_S} s"
    if process.returncode == 0:
        return ""
    if "Timeout (" in out:
        return f"a hang: a test of more than {ONE_TEST_S} s"
    failed = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"exit {process.returncode}: {out[-300:]}"


def _tests_of(tree: Path, floor: str) -> list[str]:
    """The tests that belong to a floor."""
    tests = tree / "tests"
    here = [*(tests / floor).glob("test_*.py"), *(tests / floor).glob("[a-z]*/")]
    beyond = [tests / "sim"]
    if floor == "replicas":  # the other folders take minutes and run little of the core
        here = [path for path in here if path.is_file() or path.name in _OF_THE_CORE]
        beyond = [
            tests / "oracle" / f"test_{name}.py" for name in ("traps", "decoding", "drafters")
        ]
    here.sort(key=lambda path: (path.is_dir(), path.name))
    return [path.relative_to(tree).as_posix() for path in [*here, *beyond]]


def _told(number: int, diff: str, seen: str, took_s: float) -> bool:
    """Prints a verdict; returns whether the change survived."""
    place = diff.splitlines()[0].removeprefix("--- ")
    print(f"{number:3} {place} {took_s:.0f} s: {seen or 'SURVIVED'}", flush=True)
    if not seen or os.environ.get("SHOW_ALL"):
        print(diff, flush=True)
    return not seen


if __name__ == "__main__":
    main()
