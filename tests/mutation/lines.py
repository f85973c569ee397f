"""Which tests run which lines of the core, and how long each test takes: a plugin for one run of
pytest (`-p tests.mutation.lines`), and what reads its file."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import coverage
import pytest

from tests.mutation.changes import core_modules

FILE = "LOCKSTEP_TESTS_BY_LINE"
"""Variable of the environment: the file that the plugin writes."""
_took: dict[str, float] = {}


def _file(test: str) -> str:
    return test.partition("::")[0]


@dataclass(frozen=True)
class TestsByLine:
    """Of one run. A line that runs at import alone has no tests."""

    __test__ = False
    names: tuple[str, ...]
    took_s: tuple[float, ...]
    by_line: dict[str, dict[int, list[int]]]

    @classmethod
    def read(cls, path: Path) -> TestsByLine:
        found = json.loads(path.read_text())
        by_line = {
            module: {int(line): tests for line, tests in lines.items()}
            for module, lines in found["by_line"].items()
        }
        return cls(tuple(found["names"]), tuple(found["took_s"]), by_line)

    def of(self, module: str, lines: range) -> list[str]:
        """Tests that run one of the lines, file by file, the quickest file first."""
        ran = self.by_line.get(module, {})
        files: dict[str, list[int]] = defaultdict(list)
        for test in sorted({test for line in lines for test in ran.get(line, ())}):
            files[_file(self.names[test])].append(test)
        by_time = sorted(files.values(), key=lambda tests: sum(self.took_s[t] for t in tests))
        return [self.names[test] for tests in by_time for test in tests]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    root = session.config.rootpath
    watched = coverage.Coverage(
        data_file=None, config_file=False, include=[str(root / path) for path in core_modules(root)]
    )
    session.config.stash[_COVERAGE] = watched
    watched.start()
    try:
        return (yield)
    finally:
        watched.stop()
        _write(Path(os.environ[FILE]), root, watched)


_COVERAGE = pytest.StashKey[coverage.Coverage]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.config.stash[_COVERAGE].switch_context(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Iterator[None]:
    """What a fixture of several tests runs, all tests of the file see."""
    shared = fixturedef.scope != "function"
    name = request._pyfuncitem.nodeid
    watched = request.config.stash[_COVERAGE]
    watched.switch_context(_file(name) if shared else name)
    try:
        return (yield)
    finally:
        watched.switch_context(name)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took[report.nodeid] = _took.get(report.nodeid, 0.0) + report.duration


def _write(path: Path, root: Path, watched: coverage.Coverage) -> None:
    names = list(_took)
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, name in enumerate(names):
        numbers[name].append(number)
        numbers[_file(name)].append(number)
    by_line: dict[str, dict[int, list[int]]] = defaultdict(dict)
    data = watched.get_data()
    for file in data.measured_files():
        module = Path(file).relative_to(root).as_posix()
        for line, tests in data.contexts_by_lineno(file).items():
            by_line[module][line] = sorted({number for test in tests for number in numbers[test]})
    found = {"names": names, "took_s": [_took[name] for name in names], "by_line": by_line}
    path.write_text(json.dumps(found))
