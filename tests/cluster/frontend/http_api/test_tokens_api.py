"""Proves: /tokenize and /detokenize make tokens of texts and conversations, and texts of tokens, as
a call would, for the model and within the sizes that a call may have.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from cluster.config_sources import from_args
from tests.cluster.fakes import tokenizer
from tests.cluster.frontend.http_api.test_http import Answer, http, http_frontend
from tests.cluster.frontend.rig import PROMPT, PROMPT_IDS
from tests.cluster.frontend.test_chat import TEXT
from tests.cluster.frontend.tools.test_tools import HERMES_TEMPLATE

TURNS = [{"role": "user", "content": "the fox?"}]
TOOL = {"type": "function", "function": {"name": "look"}}
FEW = from_args(
    {"frontend": {"prompt_bytes_max": 40}, "scheduler": {"prompt_tokens_max": 9}, "target": "tiny"}
)


def beginning() -> PreTrainedTokenizerFast:
    """Puts <s> before a text, and has a template that knows tools."""
    made = tokenizer().from_str(tokenizer().to_str())
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=HERMES_TEMPLATE)


async def post(app: FastAPI, path: str, **fields: Any) -> Answer:
    return await http(app, json.dumps(fields).encode(), path=path)


async def test_texts_become_tokens_and_tokens_texts() -> None:
    async with http_frontend(replicas=0, text=TEXT) as app:
        found = (await post(app, "/tokenize", prompt=PROMPT, return_token_strs=True)).json
        assert found["tokens"] == PROMPT_IDS
        assert "".join(found["token_strs"]) == PROMPT
        assert (await post(app, "/tokenize", prompt="")).json["count"] == 0
        talk = await post(app, "/tokenize", messages=TURNS, model="tiny")
        assert talk.json["count"] > len(PROMPT_IDS)
        back = await post(app, "/detokenize", tokens=PROMPT_IDS, model=None)
        assert back.json == {"prompt": PROMPT}
        assert (await http(app, path="/version")).json["version"]


async def test_special_tokens_tools_and_options_of_the_template() -> None:
    async with http_frontend(replicas=0, text=replace(TEXT, encoder=beginning())) as app:

        async def tokens(**fields: Any) -> list[int]:
            found: list[int] = (await post(app, "/tokenize", **fields)).json["tokens"]
            return found

        assert await tokens(prompt=PROMPT) == [0, *PROMPT_IDS]
        assert await tokens(prompt=PROMPT, add_special_tokens=False) == PROMPT_IDS
        plain = await tokens(messages=TURNS)
        offered = await tokens(messages=TURNS, tools=[TOOL])
        options = {"documents": "x"}
        assert len(offered) > len(plain)
        assert await tokens(messages=TURNS, chat_template_kwargs={"answer": 42}) == plain
        own = await post(app, "/tokenize", messages=TURNS, chat_template_kwargs=options)
        assert own.error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": TURNS}, "prompt"),
        ("tokenize", {"prompt": "x", "tools": [TOOL]}, "tools"),
        ("tokenize", {"messages": TURNS, "tools": [TOOL]}, "tools"),
        ("tokenize", {"messages": TURNS, "add_special_tokens": True}, "add_special_tokens"),
        ("tokenize", {"prompt": "x" * 41}, "prompt"),
        ("tokenize", {"messages": [{"role": "user", "content": "x" * 41}]}, "messages"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("detokenize", {"tokens": [5], "model": "other"}, "model"),
        ("detokenize", {"tokens": [99999]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [5] * 10}, "tokens"),
    ],
    ids=str,
)
async def test_what_a_call_may_not_ask_is_refused(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with http_frontend(replicas=0, text=TEXT, config=FEW) as app:
        answer = await post(app, f"/{path}", **fields)
        assert (answer.status, answer.error["param"]) == (404 if param == "model" else 400, param)
