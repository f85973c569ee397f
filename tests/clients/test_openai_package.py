"""Proves: the `openai` package, used as its documentation says, gets from a served Lockstep the
text of transformers' `generate`, whole, streamed and asynchronously; log-probabilities, typed
answers, tool calls, choices, stop strings and errors come in the shapes that it parses.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import NAME, Plain, Run, Served

pytestmark = [pytest.mark.ray, pytest.mark.clients]

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What does the for statement do?"},
]
PROMPT = "The for statement is"
LIMIT = 24
ROME_OR_OSLO = ({"city": "Rome"}, {"city": "Oslo"})


def test_the_package_gets_what_transformers_writes(served: Served, run: Run, plain: Plain) -> None:
    script = Path(__file__).with_name("openai_calls.py")
    questions = json.dumps({"messages": MESSAGES, "prompt": PROMPT, "limit": LIMIT})
    said = json.loads(run("python", script, f"{served.http}/v1", NAME, given=questions))
    assert (said["models"], said["model"]) == ([NAME], NAME)

    prompt = plain.prompt(MESSAGES)
    before, new = plain.tokens(prompt, LIMIT)
    expected = plain.text(prompt, LIMIT)
    for way in ("chat", "streamed", "helper", "async_streamed"):
        assert said[way] == expected, way
    assert said["async"] == [expected] * 8
    assert said["finish_reason"] == "length"
    usage = said["usage"]
    counted = usage["prompt_tokens"], usage["completion_tokens"], said["streamed_tokens"]
    assert counted == (len(before), len(new), len(new))

    assert said["several"] == said["alone"]
    assert len(set(said["several"])) > 1

    rows = plain.logprobs(before + new)[len(before) - 1 : -1]
    assert len(said["logprobs"]) == len(new)
    for told, token, row in zip(said["logprobs"], new, rows, strict=True):
        assert told["own"] == told["top"][0] == pytest.approx(float(row[token]), abs=1e-4)
        assert told["top"] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)

    assert said["parsed"]["colour"] in ("red", "blue")
    assert said["called_finish"] == "tool_calls"
    [call] = said["called"]
    assert call["name"] == "weather"
    assert json.loads(call["arguments"]) in ROME_OR_OSLO
    assert said["called_streamed"] == said["called"]
    assert said["after_call"] in ("stop", "length")

    text = plain.text(PROMPT, LIMIT)
    assert said["completion"] == text
    assert said["stopped"] == [text[: text.index(said["stop"])], "stop"]

    assert said["unknown_model"] == ["NotFoundError", 404, "model"]
    assert said["negative"] == ["BadRequestError", 400, "temperature"]


def test_responses_are_what_transformers_writes(served: Served, run: Run, plain: Plain) -> None:
    script = Path(__file__).with_name("responses_calls.py")
    questions = json.dumps({"messages": MESSAGES, "limit": LIMIT})
    said = json.loads(run("python", script, f"{served.http}/v1", NAME, given=questions))
    expected = plain.text(plain.prompt(MESSAGES), LIMIT)
    for way in ("text", "streamed", "helper", "found"):
        assert said[way] == expected, way
    assert said["status"] == "incomplete"
    assert said["parsed"]["colour"] in ("red", "blue")
    assert said["called"] in ROME_OR_OSLO
    assert said["after_call"] == said["after_turns"]
    assert said["deleted"] == 404
