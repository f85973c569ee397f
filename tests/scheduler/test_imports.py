"""Proves that the core is pure: no clock, no environment, no chance of its own.

That it brings along no Ray, tensors or network is import-linter's to prove.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import scheduler

FOLDER = Path(scheduler.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if path.stem != "__init__"
)


@pytest.mark.parametrize("module", MODULES)
def test_no_module_reads_a_clock_the_environment_or_draws_by_itself(module: str) -> None:
    tree = ast.parse((FOLDER / f"{module.replace('.', '/')}.py").read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    tops = {name.split(".")[0] for name in names}
    assert not tops & {"time", "datetime", "os", "secrets", "uuid", "asyncio", "threading"}
    # A generator may be passed in, so its type may be named where simulations draw from it.
    drawn = {name for name in names if name.split(".")[0] == "random"}
    assert drawn <= ({"random.Random"} if module.startswith("simulation.") else set())
    for node in ast.walk(tree):
        made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        assert not (made and node.func.id == "Random"), "a generator of its own"
