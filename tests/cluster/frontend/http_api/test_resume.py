"""Proves: a stream of events that broke goes on behind any of them, on another frontend, and says
together with what came before what an undisturbed one says: texts, tokens, log-probabilities, tool
calls and the end of each choice, and the usage; also behind an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import count
from typing import Any

import pytest
from fastapi import FastAPI

from cluster.config_sources import from_args
from cluster.frontend.grpc_api.api import GrpcApi
from tests.cluster.fakes import ClockAhead, perfect
from tests.cluster.frontend.http_rig import (
    ASKED,
    HERMES_TEMPLATE,
    TOOLS,
    TURNS_JSON,
    numbered,
    post,
    served,
    served_tiny,
    tiny_text,
    together,
)
from tests.cluster.frontend.rig import PROMPT, PROMPT_IDS, Late

Frontend = Callable[[], AbstractAsyncContextManager[tuple[GrpcApi, FastAPI]]]

CHAT, COMPLETIONS = "chat/completions", "completions"
TEXTS = {"max_tokens": 40, "temperature": 1, "return_token_ids": True}
SEVERAL = {"n": 2, "prompt": ["x = ", "x = "], "echo": True, "logprobs": 2, "prompt_logprobs": 1}
CALLS = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60, "temperature": 1}
LOGPROBS = {"logprobs": True, "top_logprobs": 1, "prompt_logprobs": 1}
# The text begins as the first one does, and has the second one, with a character of four tokens.
HELD = {"prompt": PROMPT_IDS + perfect(PROMPT_IDS, 40), "stop": ["lazyx", "屶rld"]}
# The second byte of a character is followed by the third one, then by more that are no text.
BYTES = tiny_text().encode("日")
WITHIN = {"prompt": [[*BYTES[:2]], [*BYTES[:1]]], "logit_bias": {str(BYTES[2]): 100}}
SEEDS = count()


def slow() -> AbstractAsyncContextManager[tuple[GrpcApi, FastAPI]]:
    """Each time a server with another seed of its own; an event has a token or two."""
    small = {"draft_len": 0, "steps_per_batch_max": 1}
    config = {"seed": next(SEEDS), "scheduler": small, "frontend": {"coalesce_ms": 1}}
    return served(from_args(config), step_s=0.01)


CASES: dict[str, tuple[Frontend, str, dict[str, Any]]] = {
    "completion": (slow, COMPLETIONS, {"prompt": PROMPT} | TEXTS | {"echo": True}),
    "chat": (slow, CHAT, {"messages": TURNS_JSON} | TEXTS),
    "greedy": (slow, COMPLETIONS, {"prompt": PROMPT} | TEXTS | {"temperature": 0}),
    "held back": (slow, COMPLETIONS, HELD | TEXTS | {"temperature": 0}),
    "choices of two prompts": (served_tiny, COMPLETIONS, SEVERAL | TEXTS),
    "within a character": (
        served_tiny,
        COMPLETIONS,
        WITHIN | TEXTS | {"echo": True, "logprobs": 0},
    ),
    "calls": (partial(served_tiny, HERMES_TEMPLATE), CHAT, {"messages": ASKED} | CALLS | LOGPROBS),
}


@pytest.mark.long
@pytest.mark.parametrize(("frontend", "path", "fields"), CASES.values(), ids=CASES)
async def test_a_stream_goes_on_behind_any_event(
    frontend: Frontend, path: str, fields: dict[str, Any]
) -> None:
    """The seed is the first server's own; the id of an event carries it."""
    fields = fields | {"stream": True, "stream_options": {"include_usage": True}}
    async with frontend() as (_made, app):
        *whole, done = numbered(await post(app, path, **fields))
    assert done == ("", {})
    names = [name for name, _ in whole]
    assert len(set(names)) == len(names) > 3
    said = together(whole)
    for number, choice in said["choices"].items():
        told = number == 0 or path == COMPLETIONS
        assert len(choice["prompts"]) == (told and "prompt_logprobs" in fields)
        assert len(choice["prompt_ids"]) == (told and "return_token_ids" in fields)
        assert (len(choice["reasons"]), choice["tokens"]) == (1, _tokens(names[-1])[number])
    several = len(said["choices"]) > 2
    texts = [choice["text"] for choice in said["choices"].values()]
    assert said["choices"][0]["reasons"] == ["stop"] or "stop" not in fields
    assert not several or len(set(texts)) == 4, "equal prompts get answers of their own"
    async with frontend() as (_made, app):
        cuts = range(len(names))[:: -4 if several else -1]
        asked = (post(app, path, headers={"last-event-id": names[at]}, **fields) for at in cuts)
        for at, again in zip(cuts, await asyncio.gather(*asked), strict=True):
            *rest, done = numbered(again)
            assert done == ("", {})
            assert together([*whole[: at + 1], *rest]) == said
            assert {name.partition(":")[0] for name, _ in rest} <= {said["id"]}


async def test_a_stream_goes_on_behind_its_error() -> None:
    fields = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": True}
    small = {"draft_len": 0, "steps_per_batch_max": 1}
    config = from_args({"scheduler": small, "frontend": {"coalesce_ms": 1}})
    clock = ClockAhead()
    async with served(config, clock=clock, load=lambda: Late(clock)) as (_made, app):
        *broken, (name, error) = numbered(await post(app, COMPLETIONS, **fields))
        whole = await post(app, COMPLETIONS, **fields | {"stream": False})
    assert error["error"]["status"] == whole.error["status"] == "DEADLINE_EXCEEDED"
    assert whole.status == 504
    async with served() as (_made, app):
        rest = numbered(await post(app, COMPLETIONS, headers={"last-event-id": name}, **fields))
        whole = numbered(await post(app, COMPLETIONS, **fields))
    choices = [together(events[:-1])["choices"] for events in ([*broken, *rest], whole)]
    assert choices[0] == choices[1]


async def test_what_is_no_id_of_an_event_of_this_stream_is_refused() -> None:
    ours, one = f"cmpl-{'0' * 32}:0:12", {"stream": True}
    wrong = [*((name, one) for name in ("x", "a:b:c:d:e", f"{ours}.1.0")), (ours, {})]
    async with served(replicas=0) as (_made, app):
        for name, fields in (*wrong, (ours, one | {"n": 2})):
            answer = await post(app, COMPLETIONS, {"last-event-id": name}, prompt="x", **fields)
            assert (answer.status, answer.error["param"]) == (400, "last-event-id"), name


def _tokens(name: str) -> list[int]:
    """Of each choice so far, as the id of an event says."""
    return [int(place.removesuffix("e")) for place in name.split(":")[2].split(",")]
