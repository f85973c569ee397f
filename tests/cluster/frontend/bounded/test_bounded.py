"""Proves: a structure or a chat template that takes more time or memory than is allowed is refused
with the reason, and so is the same call sent again. What llguidance can run gets its answer,
whatever its size.

The bounds here are small where the property does not depend on them. Processor time decides, so a
busy machine changes no outcome.
"""

from __future__ import annotations

import json
import os
import signal
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from cluster.frontend.http_api.app import http_app
from cluster.frontend.prompts import ChatPrompt
from cluster.frontend.structure import Structure
from scheduler.errors import InvalidRequest
from tests.cluster.frontend.bounded.rig import (
    BOMBED,
    ROOMY,
    SLOW_SCHEMA,
    SMALL,
    TIGHT,
    asked,
    told,
    working,
)
from tests.cluster.frontend.http_rig import TEXT, load_tiny, served_tiny, tiny_text
from tests.cluster.frontend.rig import frontend


def object_of(count: int, at: int = 0) -> dict[str, Any]:
    properties = {f"{number:x}": {"const": 1} for number in range(at, at + count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def circular(**schema: Any) -> dict[str, Any]:
    return {"$defs": {"a": schema}, "$ref": "#/$defs/a"}


def ambiguous(rules: int) -> str:
    """Each rule may be any two others."""
    names = [f"n{number}" for number in range(rules)]
    lines = ["start: " + " | ".join(names)]
    for number in range(rules):
        pairs = [f"{name} {names[(number + at) % rules]}" for at, name in enumerate(names)]
        lines.append(f"n{number}: " + " | ".join([*pairs, "/[a-z ]/"]))
    return "\n".join(lines)


# --------------------------------------------------------------------------- structures


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        ({"json": SLOW_SCHEMA}, "takes more than 0.4 s of a processor (frontend.bounded_s_max)"),
        ({"json": {"type": "number", "multipleOf": 1500007}}, "takes more than "),
        ({"grammar": ambiguous(40)}, "takes more than 0.4 s"),
        ({"json": circular(**{"$ref": "#/$defs/a"})}, ""),
        ({"json": circular(allOf=[{"$ref": "#/$defs/a"}])}, ""),
        ({"json": circular(anyOf=[{"$ref": "#/$defs/a"}])}, ""),
        ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, ""),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_structure_that_takes_too_much_or_cannot_run_is_refused_with_the_reason(
    structure: dict[str, Any], reason: str
) -> None:
    async with served_tiny(config=SMALL) as (_, app):
        answer = await asked(app, **structure)
        assert (answer.status, answer.error["param"]) == (400, "structured_outputs")
        assert reason in answer.error["message"]
        assert (await asked(app, choice=["yes"])).json["choices"][0]["text"] == "yes"


async def test_a_structure_that_takes_too_much_memory_is_refused_with_the_bound() -> None:
    async with served_tiny(config=TIGHT) as (_, app):
        answer = await asked(app, json=object_of(3000))
        assert (answer.status, answer.error["param"]) == (400, "structured_outputs")
        assert (
            "takes more than 16 MB of memory (frontend.bounded_mb_max)" in answer.error["message"]
        )


@pytest.mark.parametrize("count", [500, 3_000])
async def test_thousands_of_optional_properties(count: int) -> None:
    async with served_tiny(config=ROOMY) as (_, app):
        answer = await asked(app, json=object_of(count), tokens=3)
        assert answer.json["choices"][0]["text"][0] == "{"


@pytest.mark.parametrize("count", [2_000, 10_000, 14_000])
async def test_a_choice_of_thousands(count: int) -> None:
    """The last are 64 KiB, the most that is allowed. Many are the beginning of others."""
    texts = [f"{number}" for number in range(1, count + 1)]
    async with served_tiny(config=ROOMY) as (_, app):
        assert (await asked(app, choice=texts)).json["choices"][0]["text"] in texts


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"const": f"p{number}"} for number in range(2_500)]},
        {
            "anyOf": [
                object_of(1, at=number) | {"required": [f"{number:x}"]} for number in range(500)
            ]
        },
        {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False} | {"type": "object"},
    ],
    ids=["constants", "objects", "of itself"],
)
async def test_large_and_recursive_schemas_run(schema: dict[str, Any]) -> None:
    async with served_tiny(config=ROOMY) as (_, app):
        answer = await asked(app, json=schema)
        assert answer.status == 200
        assert answer.json["choices"][0]["text"][0] in '{"'


# --------------------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("time", "template takes more than 0.4 s of a processor (frontend.bounded_s_max)"),
        ("memory", "template takes more than 1000 MB of memory (frontend.bounded_mb_max)"),
        ("text", "template makes more than 8388608 bytes of it"),
        ("depth", "recursion"),
        ("refused", "template refuses them: not so"),
        ("wrong", "zero"),
    ],
)
async def test_a_template_that_takes_too_much_or_fails_is_the_messages_fault(
    content: str, reason: str
) -> None:
    async with frontend(text=BOMBED, load=load_tiny, config=SMALL) as made:
        app = http_app(made.service)
        answer = await told(app, content)
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert reason in answer.error["message"]
        assert (await told(app, "fine")).status == 200


async def test_rendered_is_what_transformers_renders() -> None:
    """Surrogates, large numbers and text that looks like a special token among it."""
    template = (
        "{% for m in messages %}{{ m | tojson }}{{ m.content }}{% endfor %}{{ bos_token }}"
        "{{ tools }}{{ options }}{{ add_generation_prompt }}{{ none is defined }}"
    )
    text = replace(TEXT, encoder=copy(TEXT.encoder))
    text.encoder.chat_template = template
    turns = [
        {"role": "user", "content": "é <s> \u2028 😀", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"n": 2**70, "f": 0.1, "e": []}]},
    ]
    options = {"options": {"deep": [1, {"a": None}], "inf": float("inf")}, "bos_token": "<own>"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    expected = text.encoder.apply_chat_template(
        turns, tools=tools, add_generation_prompt=True, tokenize=False, **options
    )
    with working(text) as work:
        prompt = ChatPrompt(turns, tools, options)
        assert await work.rendered(prompt) == work.rendered_now(prompt) == expected
        for name in ("messages", "conversations"):
            with pytest.raises(InvalidRequest, match=r"^messages: "):
                await work.rendered(ChatPrompt(turns, (), {name: []}))


# --------------------------------------------------------------------------- verdicts


async def test_what_is_sent_again_is_answered_without_a_process() -> None:
    """The process is stopped, and could not answer."""
    bomb, good = Structure("json_schema", [json.dumps(SLOW_SCHEMA)]), Structure("regex", ["a+"])
    with working(tiny_text(), SMALL) as work:
        grammar = await work.grammar(good)
        with pytest.raises(InvalidRequest) as first:
            await work.grammar(bomb)
        for pid in work.pids:
            os.kill(pid, signal.SIGSTOP)
        again = replace(bomb, given_as="tools")
        with pytest.raises(InvalidRequest, match=r"^tools: ") as second:
            await work.grammar(again)
        assert first.value.reason == second.value.reason
        assert await work.grammar(good) == work.grammar_now(good) == grammar


async def test_what_is_committed_is_part_of_a_verdict() -> None:
    text = tiny_text()
    structure = Structure("choice", ["yes", "no"])
    with working(text) as work:
        allowed, other = text.encode("yes", False), text.encode("maybe", False)
        grammar = await work.grammar(structure)
        assert await work.grammar(structure, allowed) == grammar
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"^committed_token_ids: choice does not"):
                await work.grammar(structure, other)
        assert await work.grammar(structure, [-1, 99_999]) == grammar, "refused elsewhere"
