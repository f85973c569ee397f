"""Proves: a long answer is the same JSON, is written piece by piece, and leaves in parts, of which
few are on their way at once, however slowly Serve takes them. What a call may ask for has a bound.
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
from tests.cluster.frontend.http_rig import TEXT, http_frontend, post, served
from tests.cluster.frontend.rig import PROMPT_IDS, both, frontend
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
