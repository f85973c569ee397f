"""Proves: what `import lockstep` loads is small, and the model in one process loads no Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("statement", "without"),
    [
        ("import lockstep", {"torch", "transformers", "ray", "grpc", "pydantic"}),
        ("from lockstep import Client", {"torch", "transformers", "ray"}),
        ("from lockstep import LLM", {"ray", "fastapi"}),
    ],
)
def test_a_name_of_the_door_loads_what_it_needs(statement: str, without: set[str]) -> None:
    code = f"{statement}; import sys; print(sorted({without!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
