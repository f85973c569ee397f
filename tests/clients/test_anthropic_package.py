"""Proves: the `anthropic` package, used as its documentation says, gets from a served Lockstep the
text of transformers' `generate`, whole and streamed, its tokens counted; calls and refusals come in
the shapes that it parses.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import NAME, Plain, Run, Served
from tests.clients.test_openai_package import LIMIT, MESSAGES, ROME_OR_OSLO

pytestmark = [pytest.mark.ray, pytest.mark.clients]


def test_the_package_gets_what_transformers_writes(served: Served, run: Run, plain: Plain) -> None:
    script = Path(__file__).with_name("messages_calls.py")
    questions = json.dumps({"messages": MESSAGES, "limit": LIMIT})
    said = json.loads(run("python", script, served.http, NAME, given=questions))
    prompt = plain.prompt(MESSAGES)
    expected = plain.text(prompt, LIMIT)
    assert (said["text"], said["streamed"]) == (expected, expected)
    assert said["stop_reason"] == said["final"] == "max_tokens"
    assert said["counted"] == len(plain.tokens(prompt, 1)[0])
    assert said["called"] in ROME_OR_OSLO
    assert said["called_stop"] == "tool_use"
    assert said["after_call"] in ("max_tokens", "end_turn")
    assert said["refused"] == 400
