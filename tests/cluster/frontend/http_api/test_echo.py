"""Proves: an answer repeats its prompt, also with stop strings, several prompts and choices, and
tells of it without any new token; text, tokens and their offsets agree where special tokens stand
in the prompt or in the answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cluster.frontend.http_rig import (
    TEXT,
    beginning,
    events,
    http_frontend,
    post,
    served,
    served_tiny,
    tiny_text,
)
from tests.cluster.frontend.rig import PROMPT, PROMPT_IDS

BEGIN = "<s>"
"""That token has the id 0; a text becomes tokens with one before it."""


@pytest.mark.parametrize(
    ("prompt", "echo", "hidden"),
    [
        (PROMPT, PROMPT, 1),
        (BEGIN + PROMPT, BEGIN + PROMPT, 1),
        ([0, *PROMPT_IDS, 0], BEGIN + PROMPT + BEGIN, 0),
    ],
)
async def test_an_echo_has_the_special_tokens_that_were_given(
    prompt: str | list[int], echo: str, hidden: int
) -> None:
    """`hidden`: tokens that are not in the echo."""
    async with http_frontend(text=replace(TEXT, encoder=beginning())) as app:
        asked = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
        [choice] = (await post(app, "completions", **asked)).json["choices"]
        assert choice["text"] == echo
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == BEGIN * hidden + echo
        at = 0
        for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
            assert offset == at
            at += len(token) if echo.startswith(token, at) else 0
        assert at == len(echo)


async def test_special_tokens_of_an_answer_take_no_place_in_its_text() -> None:
    async with served_tiny() as (_made, app):
        asked: dict[str, Any] = {"prompt": "x = ", "max_tokens": 3, "logprobs": 0}
        asked |= {"ignore_eos": True, "logit_bias": {str(tiny_text().eos_token_ids[0]): 100}}
        [choice] = (await post(app, "completions", **asked)).json["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == ("", [0, 0, 0])


async def test_whole_answers_to_several_prompts_each_repeat_their_own() -> None:
    fields: dict[str, Any] = {"prompt": [PROMPT, PROMPT_IDS[:1]], "n": 2, "echo": True}
    fields |= {"max_tokens": 20, "temperature": 1, "seed": 5}
    async with served() as (_made, app):
        alone = (await post(app, "completions", **fields | {"echo": False})).json["choices"]
        answer = (await post(app, "completions", **fields)).json
        echoed, usage = answer["choices"], answer["usage"]
        first = TEXT.tokenizer.decode(PROMPT_IDS[:1])
        for echo, one, other in zip([PROMPT] * 2 + [first] * 2, alone, echoed, strict=True):
            assert other == one | {"text": echo + one["text"]}
        assert [choice["index"] for choice in echoed] == [0, 1, 2, 3]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT_IDS) + 1, 80)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_is_looked_for_behind_the_echo(stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    async with served() as (_made, app):
        plain = (await post(app, "completions", **fields)).json["choices"][0]["text"]
        for stop, said in (
            (plain[20:23], plain[: plain.index(plain[20:23])]),
            (PROMPT, plain),
            (PROMPT[-1:] + plain[:2], plain),
        ):
            answer = await post(app, "completions", **fields, echo=True, stop=stop, stream=stream)
            parts = events(answer) if stream else [answer.json]
            choices = [part["choices"][0] for part in parts]
            assert "".join(one["text"] for one in choices) == PROMPT + said
            assert choices[-1]["finish_reason"] == ("length" if said == plain else "stop")
