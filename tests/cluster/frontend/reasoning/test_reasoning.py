"""Proves: an answer tells of its reasoning apart from its text, whole, streamed and over gRPC, and
counts its tokens; behind the reasoning a schema binds the text, and tools their calls; a budget
ends the reasoning; a stream that goes on from committed tokens says the rest of a whole one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.http_api.app import http_app
from cluster.frontend.pool_session import InFlightRequest
from cluster.frontend.target_text import TargetText
from protos import lockstep_pb2 as pb
from replicas.grammars import Grammars
from replicas.replica import Replica
from scheduler.messages import FinishReason
from tests.cluster.fakes import tokenizer
from tests.cluster.frontend.http_rig import (
    ASKED,
    GRPC_TOOLS,
    TEXT,
    TOOLS,
    Answer,
    events,
    load_tiny,
    post,
    served,
    tiny_text,
)
from tests.cluster.frontend.rig import CONFIG, Context, asked, brings, ends, frontend, stream
from tests.cluster.wire import until

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "\n</tool_call>{% endfor %}\n{% endfor %}assistant: "
)
CLOSED = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
THINKER = replace(
    TEXT,
    encoder=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), eos_token="</s>", chat_template=TEMPLATE + CLOSED
    ),
)
WRITTEN = "<think>\nI see.\n</think>\n\nYes."
THOUGHT = {"reasoning": "I see.", "reasoning_content": "I see."}


def ids(text: str) -> list[int]:
    return tokenizer().encode(text).ids


async def answered(made: GrpcApi, written: str, **fields: Any) -> Answer:
    """Of a target that writes this."""
    app = http_app(made.service)
    call = asyncio.ensure_future(post(app, "chat/completions", messages=ASKED, **fields))
    live = await asked(made)
    brings(made, live, ids(written))
    ends(made, live, FinishReason.STOP)
    return await call


def said(answer: Answer, stream: bool) -> dict[str, str]:
    """All texts of the turn, by their names."""
    if not stream:
        [choice] = answer.json["choices"]
        parts = [choice["message"]]
    else:
        parts = [event["choices"][0]["delta"] for event in events(answer) if event["choices"]]
    told = dict[str, str]()
    for part in parts:
        for name in ("content", "reasoning", "reasoning_content"):
            if part.get(name):
                told[name] = told.get(name, "") + part[name]
    return told


@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_is_told_apart_and_counted(stream: bool) -> None:
    async with frontend(replicas=0, text=THINKER) as made:
        options: dict[str, Any] = {"stream": stream}
        if stream:
            options["stream_options"] = {"include_usage": True}
        whole = await answered(made, WRITTEN, **options)
        assert said(whole, stream) == {"content": "Yes."} | THOUGHT
        usage = (events(whole)[-1] if stream else whole.json)["usage"]
        within = ids(WRITTEN[: WRITTEN.index("</think>")])
        before = len(ids("<think>"))
        counted = usage["completion_tokens_details"]["reasoning_tokens"]
        assert usage["reasoning_tokens"] == counted
        assert len(within) - before <= counted <= len(within) - before + len(ids("</think>"))
        hidden = await answered(made, WRITTEN, **options, include_reasoning=False)
        assert said(hidden, stream) == {"content": "Yes."}
        # The prompt says that there is none.
        plain = await answered(made, "a</think>b", **options, reasoning_effort="none")
        assert said(plain, stream) == {"content": "a</think>b"}
        again = {"committed_token_ids": ids(WRITTEN[:10]), "seed": 1}
        rest = await answered(made, WRITTEN[10:], **options, **again)
        told = said(rest, stream)
        assert "I see.".endswith(told["reasoning"])
        assert told["content"] == "Yes."


@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_may_be_part_of_the_text(stream: bool) -> None:
    async with frontend(replicas=0, text=THINKER) as made:
        whole = await answered(made, WRITTEN, stream=stream, separate_reasoning=False)
        assert said(whole, stream) == {"content": WRITTEN}
        options: dict[str, Any] = {"separate_reasoning": False, "messages": ASKED}
        for more in ({"tools": TOOLS}, {"include_reasoning": False}):
            refused = await post(http_app(made.service), "chat/completions", **options, **more)
            assert refused.error["message"].startswith("separate_reasoning: must be true with")


def has_taken(live: InFlightRequest, tokens: int) -> bool:
    return len(live.tokens) == tokens and not live.changed.is_set()


async def test_a_stream_may_give_its_reasoning_in_one_piece() -> None:
    async with frontend(replicas=0, text=THINKER) as made:
        fields = {"messages": ASKED, "stream": True, "stream_reasoning": False}
        call = asyncio.ensure_future(post(http_app(made.service), "chat/completions", **fields))
        live = await asked(made)
        for count, token in enumerate(ids(WRITTEN), start=1):  # each in an event of its own
            brings(made, live, [token])
            await until(partial(has_taken, live, count))
        ends(made, live, FinishReason.STOP)
        answer = await call
        assert said(answer, True) == {"content": "Yes."} | THOUGHT
        deltas = [event["choices"][0]["delta"] for event in events(answer)]
        assert len(deltas) > 2
        told = [delta["reasoning_content"] for delta in deltas]
        assert list(filter(None, told)) == ["I see."]


async def test_what_tells_of_no_reasoning_says_so() -> None:
    """Clients of other servers read the field of every turn and of every delta."""
    async with frontend(replicas=0, text=THINKER) as made:
        whole = await answered(made, "Yes.")
        [choice] = whole.json["choices"]
        nothing = dict.fromkeys(THOUGHT)
        assert choice["message"] == {"role": "assistant", "content": "Yes."} | nothing
        assert whole.json["usage"]["reasoning_tokens"] == 0
        streamed = await answered(made, "Yes.", stream=True)
        assert all(
            event["choices"][0]["delta"]["reasoning_content"] is None for event in events(streamed)
        )


async def test_reasoning_is_told_over_grpc() -> None:
    async with frontend(replicas=0, text=THINKER) as made:
        turns = [pb.ChatMessage(role="user", content="so?")]
        request = pb.GenerateRequest(messages=turns)
        call = asyncio.ensure_future(stream(made, request, Context()))
        live = await asked(made)
        brings(made, live, ids(WRITTEN))
        ends(made, live, FinishReason.STOP)
        chunks = await call
        assert "".join(chunk.reasoning for chunk in chunks) == "I see."
        assert "".join(chunk.text for chunk in chunks) == "Yes."
        assert chunks[-1].end.usage.reasoning_tokens


# --------------------------------------------------------------------------- with the tiny pair


@cache
def thinking_tokenizer() -> Tokenizer:
    """The tiny target's, in which the last two tokens are the markers of reasoning."""
    described = json.loads(tiny_text().tokenizer.to_str())
    vocab: dict[str, int] = described["model"]["vocab"]
    last = {max(vocab.values()): "</think>", max(vocab.values()) - 1: "<think>"}
    gone = {name for name, token in vocab.items() if token in last}
    described["model"]["vocab"] = {last.get(token, name): token for name, token in vocab.items()}
    merges = described["model"]["merges"]
    kept = [pair for pair in merges if "".join(pair) not in gone and gone.isdisjoint(pair)]
    described["model"]["merges"] = kept
    for token, name in last.items():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        described["added_tokens"].append({"id": token, "content": name, **flags})
    return Tokenizer.from_str(json.dumps(described))


def thinking_text(template: str) -> TargetText:
    encoder = copy(tiny_text().encoder)
    encoder._tokenizer = thinking_tokenizer()
    encoder.chat_template = template
    return replace(tiny_text(), tokenizer=thinking_tokenizer(), encoder=encoder)


def load_thinking() -> Replica:
    replica = load_tiny()
    text = thinking_text(TEMPLATE)
    width = replica.spec.embedding_size
    replica.grammars = Grammars(text.tokenizer, text.end_of_turn_ids, width)
    return replica


@asynccontextmanager
async def thinking(template: str = TEMPLATE + "<think>") -> AsyncIterator[tuple[GrpcApi, FastAPI]]:
    async with served(CONFIG, thinking_text(template), load=load_thinking) as both:
        yield both


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 7]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


async def test_a_structure_begins_where_the_reasoning_ends() -> None:
    fields: dict[str, Any] = {"messages": ASKED, "max_tokens": 40, "temperature": 1, "n": 4}
    fields |= {"seed": 3, "thinking_token_budget": 6}
    async with thinking() as (made, app):
        schema, forced, both, free, none = await asyncio.gather(
            post(app, "chat/completions", **fields, response_format=FORMAT),
            post(app, "chat/completions", **fields, tools=TOOLS, tool_choice="required"),
            post(app, "chat/completions", **fields, tools=TOOLS, response_format=FORMAT),
            post(app, "chat/completions", **fields),
            post(app, "chat/completions", **(fields | {"thinking_token_budget": 0})),
        )
        for answer in (schema, forced, both, free):
            count = answer.json["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert 0 < count <= 4 * 6
            assert all(choice["message"]["reasoning"] for choice in answer.json["choices"])
        assert not none.json["usage"]["completion_tokens_details"]["reasoning_tokens"]
        for choice in schema.json["choices"]:
            assert json.loads(choice["message"]["content"])["a"] in ("x", 7)
        for choice in forced.json["choices"]:
            assert choice["message"]["content"] is None
            assert choice["message"]["tool_calls"]
        for choice in both.json["choices"]:
            if not choice["message"].get("tool_calls"):
                assert json.loads(choice["message"]["content"])["a"] in ("x", 7)
        request = pb.GenerateRequest(
            messages=[pb.ChatMessage(**turn) for turn in ASKED],
            tools=GRPC_TOOLS,
            tool_mode=pb.TOOL_MODE_REQUIRED,
            max_new_tokens=40,
            temperature=1,
            seed=3,
            thinking_token_budget=6,
        )
        over_grpc = await made.Generate(request, Context())
        [first, *_] = forced.json["choices"]
        assert over_grpc.reasoning == first["message"]["reasoning"]
        assert [call.arguments for call in over_grpc.tool_calls] == [
            call["function"]["arguments"] for call in first["message"]["tool_calls"]
        ]


async def test_a_budget_needs_a_target_that_reasons() -> None:
    async with thinking("{{ messages[0].content }}") as (_made, app):
        refused = await post(app, "chat/completions", messages=ASKED, thinking_token_budget=5)
        assert (refused.status, refused.error["param"]) == (400, "thinking_token_budget")
