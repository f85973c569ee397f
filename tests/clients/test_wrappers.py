"""Proves: litellm, langchain-openai, instructor and pydantic-ai, each by its own package, get from
a served Lockstep the text of transformers' `generate`, and typed answers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import NAME, WRAPPERS, Plain, Run, Served

pytestmark = [pytest.mark.ray, pytest.mark.clients]

QUESTIONS = {"system": "Be short.", "user": "What does the for statement do?", "limit": 24}


def test_packages_around_the_openai_package_get_their_answers(
    served: Served, run: Run, plain: Plain
) -> None:
    script = Path(__file__).with_name("wrapper_calls.py")
    called = (str(WRAPPERS / "python"), script, f"{served.http}/v1", NAME)
    said = json.loads(run(*called, given=json.dumps(QUESTIONS)))
    turns = [{"role": role, "content": str(QUESTIONS[role])} for role in ("system", "user")]
    text = plain.text(plain.prompt(turns), 24)
    for package in ("litellm", "langchain", "pydantic_ai"):
        for way in ("whole", "streamed"):
            assert said[package].get(way, text) == text, (package, way)
    typed = [said["langchain"]["typed"], said["pydantic_ai"]["typed"], *said["instructor"].values()]
    assert len(typed) == 4
    for report in typed:
        assert report["colour"] in ("red", "blue")
        assert isinstance(report["certain"], bool)
