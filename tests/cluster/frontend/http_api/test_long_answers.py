"""Proves: a long answer is the same JSON, is written piece by piece, and leaves in parts, of which
few are on their way at once, however slowly Serve takes them. What a call may ask for has a bound,
also where it asks for log-probabilities of the whole vocabulary, which are the same at every edge.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.config_sources import from_args
from cluster.frontend.http_api import openai_answers
from cluster.frontend.http_api.long_json import LongJson, send_pieces
from cluster.frontend.json_codec import LongArray, json_array, json_pieces
from cluster.frontend.proxy import pacing
from cluster.frontend.proxy.pacing import PART_BYTES_MIN, NotTaken, PacedAnswers
from protos import lockstep_pb2 as pb
from tests.cluster.frontend.http_rig import TEXT, events, http_frontend, post, served, served_tiny
from tests.cluster.frontend.rig import PROMPT_IDS, Context, both, frontend
from tests.cluster.wire import until

VALUES = list(range(1000))
PART = b"x" * PART_BYTES_MIN


def doubled(value: int) -> dict[str, int]:
    return {"of": 2 * value}


# --------------------------------------------------------------------------- pieces


@pytest.mark.parametrize("size", [0, 1, 64, 65, 128, 1000])
def test_a_long_array_is_written_as_a_list_is(size: int) -> None:
    short = [doubled(value) for value in VALUES[:size]]
    long = json_array(VALUES[:size], doubled)
    assert isinstance(long, LongArray) is (size > 64)
    value = {"a": "ä\n", "b": [{"c": long, "d": None}, {"c": []}], "e": {"f": long}, "g": [1, 2]}
    plain = {"a": "ä\n", "b": [{"c": short, "d": None}, {"c": []}], "e": {"f": short}, "g": [1, 2]}
    assert json.loads("".join(json_pieces(value))) == plain


def test_what_a_long_array_holds_is_made_as_it_is_written() -> None:
    made: list[int] = []

    def noted(value: int) -> int:
        made.append(value)
        return value

    pieces = json_pieces({"a": json_array(VALUES, noted)})
    assert made == []
    while not made:
        next(pieces)
    assert len(made) < len(VALUES) / 10


@pytest.mark.parametrize("size", [100, 3000])
def test_items_of_many_values_are_written_as_they_are_and_few_at_once(size: int) -> None:
    """As a list, as an object with many names, as objects in an object."""
    forms = (
        lambda value: {"top": json_array(range(size), lambda other: {"of": other + value})},
        lambda value: {str(other): value for other in range(size)},
        lambda value: {str(other): {"of": value} for other in range(size)},
    )
    for form in forms:
        made: list[int] = []

        def noted(value: int, form: Any = form, made: list[int] = made) -> Any:
            made.append(value)
            return form(value)

        array = json_array(VALUES[:40], noted, size)
        assert isinstance(array, LongArray)
        pieces = json_pieces({"a": array})
        text = "".join(next(pieces) for _ in range(6))
        assert len(made) <= 20
        told = list(pieces)
        assert max(map(len, told)) < 40_000
        plain = [form(value) for value in VALUES[:40]]
        for value, item in enumerate(plain):
            if "top" in item:
                item["top"] = [{"of": other + value} for other in range(size)]
        assert json.loads(text + "".join(told)) == {"a": plain}


# --------------------------------------------------------------------------- parts


class Serve:
    """Takes what is sent when it is told to, as Serve does: it pickles all that waits."""

    def __init__(self) -> None:
        self.waiting: list[Message] = []
        self.sent: list[list[Message]] = []

    async def send(self, message: Message) -> None:
        self.waiting.append(message)

    def take(self) -> None:
        self.sent.append(pickle.loads(pickle.dumps(self.waiting)))
        self.waiting = []


def paced(app: Any, serve: Serve) -> asyncio.Task[None]:
    async def receive() -> Message:
        raise AssertionError

    return asyncio.ensure_future(PacedAnswers(app)({"type": "http"}, receive, serve.send))


async def parts(scope: Scope, receive: Receive, send: Send) -> None:
    for number in range(100):
        part = b"%d" % number + PART
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def test_few_parts_wait_and_all_arrive_in_order() -> None:
    serve = Serve()
    answering = paced(parts, serve)
    while not answering.done():
        await asyncio.sleep(0)
        await until(lambda: serve.waiting or answering.done())
        serve.take()
    await answering
    serve.take()
    assert max(map(len, serve.sent)) <= 4
    bodies = [message["body"] for messages in serve.sent for message in messages]
    assert bodies == [b"%d" % number + PART for number in range(100)]
    assert {type(body) for body in bodies} == {bytes}


async def test_short_parts_do_not_wait() -> None:
    async def short(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    serve = Serve()
    await paced(short, serve)
    assert len(serve.waiting) == 100


async def test_an_answer_whose_parts_are_never_taken_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_TAKEN_S", 0.01)
    with pytest.raises(NotTaken):
        await paced(parts, Serve())


async def test_an_answer_of_many_parts_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part has a bound, and other tasks run between two of them."""
    value = {"a": json_array(VALUES * 100, doubled)}
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    running = asyncio.ensure_future(others())
    await LongJson(value, asyncio.Lock())({}, None, send)  # type: ignore[arg-type]
    running.cancel()
    bodies = [message["body"] for message in sent[1:]]
    assert json.loads(b"".join(bodies)) == {"a": [doubled(of) for of in VALUES * 100]}
    assert max(map(len, bodies)) < (1 << 16) + (1 << 14)
    assert turns >= len(bodies) - 2 > 2


async def test_of_all_long_answers_one_part_is_made_at_a_time() -> None:
    """Between two rounds of the event loop, however many are written."""
    made = rounds = 0
    most = 0

    def value(item: int) -> str:
        nonlocal made
        made += 1
        return "x" * 1000

    async def others() -> None:
        nonlocal made, most, rounds
        while True:
            rounds += 1
            most, made = max(most, made), 0
            await asyncio.sleep(0)

    async def send(message: Message) -> None:
        pass

    async def write() -> None:
        await send_pieces(send, json_pieces(json_array(VALUES, value)), turns)

    turns = asyncio.Lock()
    running = asyncio.ensure_future(others())
    writing = asyncio.gather(*(write() for _ in range(20)))
    await asyncio.sleep(0)  # Their first parts.
    await asyncio.sleep(0)
    made = most = 0
    await writing
    running.cancel()
    assert rounds > 20
    assert 0 < most <= 2 * 64


# --------------------------------------------------------------------------- the bound


FEW = from_args({"frontend": {"coalesce_ms": 1, "logprobs_max": 100}})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 50, "logprobs": 1}, None),
        ({"max_tokens": 51, "logprobs": 1}, "logprobs"),
        ({"max_tokens": 50, "logprobs": 1, "n": 2}, "logprobs"),
        ({"max_tokens": 50, "logprobs": 1, "stream": True, "n": 2}, "logprobs"),
        ({"max_tokens": 1, "prompt_logprobs": 20}, None),
        ({"max_tokens": 1, "prompt_logprobs": 20, "n": 3}, "prompt_logprobs"),
        ({"max_tokens": 0, "echo": True, "logprobs": 20, "n": 3}, "logprobs"),
        ({"max_tokens": 10}, None),
    ],
    ids=str,
)
async def test_more_log_probabilities_than_a_call_may_ask_for_are_refused(
    fields: dict[str, Any], param: str | None
) -> None:
    """A prompt of 2 tokens."""
    assert len(PROMPT_IDS) == 2
    async with served(config=FEW) as (made, app):
        answer = await post(app, "completions", prompt=PROMPT_IDS, **fields)
        if param is None:
            assert answer.status == 200
        else:
            assert (answer.status, answer.error["param"]) == (400, param)
            assert "more than 100 log-probabilities" in answer.error["message"]
            assert pool_is_idle(made)


def pool_is_idle(made: Any) -> bool:
    return made.service.router.unfinished == 0


async def test_both_calls_of_grpc_have_the_same_bound() -> None:
    async with frontend(config=FEW) as made:
        ids = pb.TokenIds(ids=PROMPT_IDS)
        request = pb.GenerateRequest(prompt_token_ids=ids, max_new_tokens=51, logprobs=1)
        for context in await both(made, request):
            assert context.details.startswith("logprobs: more than 100")


async def test_prompts_count_together() -> None:
    async with http_frontend(config=FEW, text=TEXT) as app:
        fields = {"max_tokens": 1, "prompt_logprobs": 9}
        assert (await post(app, "completions", prompt=[PROMPT_IDS] * 5, **fields)).status == 200
        answer = await post(app, "completions", prompt=[PROMPT_IDS] * 6, **fields)
        assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")


# --------------------------------------------------------------------------- the vocabulary

TINY_VOCAB = 4096
CHAT = {"messages": [{"role": "user", "content": "the fox?"}], "logprobs": True, "temperature": 0}


def all_of(config: dict[str, Any]) -> Any:
    """Settings with which a request may ask for all."""
    return from_args({"frontend": {"coalesce_ms": 1, **config}, "scheduler": {"max_logprobs": -1}})


async def test_the_whole_vocabulary_is_told_of_at_every_edge_and_begins_with_the_likeliest() -> (
    None
):
    written: dict[str, Any] = {
        "prompt": "def add(",
        "max_tokens": 3,
        "temperature": 0,
        "echo": True,
    }
    ids = {"return_tokens_as_token_ids": True}
    async with served_tiny("{{ messages[0]['content'] }}", config=all_of({})) as (made, app):

        async def told(path: str, **fields: Any) -> Any:
            answer = await post(app, path, **fields)
            assert answer.status == 200, answer.body
            return answer.json

        few, every = [
            await told("completions", **written, **ids, logprobs=top, prompt_logprobs=top)
            for top in (5, -1)
        ]
        [few, every] = [answer["choices"][0] for answer in (few, every)]
        assert few["text"] == every["text"]
        assert few["logprobs"]["token_logprobs"] == every["logprobs"]["token_logprobs"]
        rows = zip(few["logprobs"]["top_logprobs"], every["logprobs"]["top_logprobs"], strict=True)
        for first, whole in list(rows)[1:]:
            assert len(whole) == TINY_VOCAB
            assert first.items() <= whole.items()
            assert set(sorted(whole.values())[-5:]) <= set(first.values())
        rows = zip(few["prompt_logprobs"], every["prompt_logprobs"], strict=True)
        for first, whole in list(rows)[1:]:
            assert len(whole) == TINY_VOCAB
            assert first.items() <= whole.items()
            assert {entry["rank"] for entry in whole.values()} <= set(range(1, 1 + TINY_VOCAB))

        few, every = [
            (await told("chat/completions", **CHAT, max_tokens=3, top_logprobs=top))["choices"]
            for top in (5, -1)
        ]
        [few, every] = [choices[0]["logprobs"]["content"] for choices in (few, every)]
        assert [len(token["top_logprobs"]) for token in every] == [TINY_VOCAB] * 3
        for first, whole in zip(few, every, strict=True):
            assert first["top_logprobs"] == whole.pop("top_logprobs")[:5]
            del first["top_logprobs"]
            assert first == whole
        streamed = await post(
            app, "chat/completions", **CHAT, max_tokens=3, top_logprobs=-1, stream=True
        )
        content = [
            token
            for event in events(streamed)
            for token in event["choices"][0]["logprobs"]["content"]
        ]
        assert [len(token["top_logprobs"]) for token in content] == [TINY_VOCAB] * 3

        include = ["message.output_text.logprobs"]
        asked = {"input": "def", "top_logprobs": -1, "include": include, "max_output_tokens": 16}
        response = await told("responses", **asked, temperature=0)
        logprobs = response["output"][0]["content"][0]["logprobs"]
        assert {len(token["top_logprobs"]) for token in logprobs} == {TINY_VOCAB}

        for count in (5, -1):
            asked = pb.GenerateRequest(prompt="def", max_new_tokens=3, logprobs=count)
            answer = await made.Generate(asked, Context())
            if count == 5:
                likeliest = [list(said.top_ids) for said in answer.logprobs]
        assert [list(said.top_ids)[:5] for said in answer.logprobs] == likeliest
        assert [len(said.top_logprobs) for said in answer.logprobs] == [TINY_VOCAB] * 3


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": "def", "logprobs": -1}, "logprobs"),
        ("completions", {"prompt": "def", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt": "def", "logprobs": 3, "echo": True, "max_tokens": 0}, None),
        ("chat/completions", CHAT | {"top_logprobs": -1}, "top_logprobs"),
    ],
)
async def test_the_whole_vocabulary_counts_in_what_a_call_may_ask_for(
    path: str, fields: dict[str, Any], param: str | None
) -> None:
    """And is refused where the server does not allow it."""
    template = "{{ messages[0]['content'] }}"
    fields = {"max_tokens": 2} | fields
    few = all_of({"logprobs_max": TINY_VOCAB})
    for config, reason in (
        (few, f"more than {TINY_VOCAB} log-probabilities"),
        (FEW, "must be in [0, 20], is -1"),
    ):
        async with served_tiny(template, config=config) as (made, app):
            answer = await post(app, path, **fields)
            if param is None:
                assert answer.status == 200
            else:
                assert (answer.status, answer.error["param"]) == (400, param)
                assert answer.error["message"].startswith(f"{param}: {reason}")
            assert pool_is_idle(made)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_an_answer_that_is_written_choice_by_choice_is_the_same(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"max_tokens": 100, "n": 3, "prompt_logprobs": 2, "seed": 1}
    fields |= {"prompt": [PROMPT_IDS] * 2, "echo": True, "logprobs": 2}
    if path.startswith("chat"):
        fields |= {"messages": [{"role": "user", "content": "the fox?"}], "logprobs": True}
        fields |= {"top_logprobs": 2, "prompt": None, "echo": None}
    told = []
    for most in (10_000, 0):
        monkeypatch.setattr(openai_answers, "_TOLD_AT_ONCE", most)
        async with http_frontend(text=TEXT) as app:
            answer = await post(app, path, **fields)
        assert answer.status == 200
        told.append({name: answer.json[name] for name in ("model", "choices", "usage")})
    assert told[0] == told[1]
