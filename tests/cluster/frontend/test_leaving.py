"""Proves: a frontend that must go lets calls end within its grace, and ends the rest itself: with
503 and the reason, a stream with an event behind which its client goes on elsewhere. Where no
replica can start, calls end at once with the reason, and health says it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import StatusCode

from cluster.frontend import service as service_module
from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.http_api.app import http_app
from cluster.frontend.service import LEAVES
from protos import lockstep_pb2 as pb
from tests.cluster.fakes import perfect
from tests.cluster.frontend.http_rig import Answer, http, numbered, post
from tests.cluster.frontend.rig import PROMPT, PROMPT_IDS, both, frontend, unfinished
from tests.cluster.wire import until

LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
REASON = "no replica can start: OSError: no such model"


async def asked(made: GrpcApi, **fields: Any) -> asyncio.Task[Answer]:
    app = http_app(made.service)
    before = unfinished(made.service)
    model = made.service.config.model_name
    task = asyncio.create_task(post(app, "completions", **LONG, model=model, **fields))
    await until(lambda: unfinished(made.service) > before)
    return task


async def test_what_outlasts_the_grace_ends_with_a_reason_and_a_place_to_go_on() -> None:
    async with frontend(step_s=0.02) as made:
        streamed, whole = await asked(made, stream=True, return_token_ids=True), await asked(made)
        await until(lambda: any(live.tokens for live in made.service.router.sessions[0].unfinished))
        await made.service.leave(0.0)
        answer = await whole
        assert (answer.status, answer.error["message"]) == (503, LEAVES)
        assert int(answer.headers["retry-after"]) >= 1
        # What comes still, before Serve's proxies know, is told the same.
        for context in await both(made, pb.GenerateRequest(prompt=PROMPT)):
            assert (context.code, context.details) == (StatusCode.UNAVAILABLE, LEAVES)
            assert "lockstep-final" not in context.trailing
        *events, (last_id, error) = numbered(await streamed)
    assert error["error"]["status"] == "UNAVAILABLE"
    had = [token for _, event in events for token in event["choices"][0]["token_ids"]]
    assert 0 < len(had) < 300
    async with frontend() as other:
        rest = await post(
            http_app(other.service),
            "completions",
            {"last-event-id": last_id},
            **LONG,
            model=other.service.config.model_name,
            stream=True,
            return_token_ids=True,
        )
        new = [t for _, e in numbered(rest) if e for t in e["choices"][0]["token_ids"]]
    assert had + new == perfect(PROMPT_IDS, 300)


async def test_what_ends_within_the_grace_is_whole() -> None:
    async with frontend(step_s=0.002) as made:
        whole = await asked(made, return_token_ids=True)
        leaving = asyncio.create_task(made.service.leave(100.0))
        answer = await whole
        assert answer.json["choices"][0]["token_ids"] == perfect(PROMPT_IDS, 300)
        leaving.cancel()


# --------------------------------------------------------------------------- no replica


@asynccontextmanager
async def without_replicas(
    said: list[tuple[str, bool]], patch: pytest.MonkeyPatch
) -> AsyncIterator[GrpcApi]:
    """Serve says the last of what was `said` of its replicas, of which there are none."""

    async def why() -> tuple[str, bool]:
        return said[-1]

    patch.setattr(service_module, "_LOOK_S", 0.01)
    async with frontend(replicas=0) as made:
        made.service._why_no_replica = why
        made.service._watching = asyncio.create_task(made.service._watch_replicas())
        yield made


async def test_while_replicas_fail_to_start_new_calls_end_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = [("", False)]
    async with without_replicas(said, monkeypatch) as made:
        waits = await asked(made)
        said.append((REASON, False))
        await until(lambda: made.service.unable == REASON)
        for context in await both(made, pb.GenerateRequest(prompt=PROMPT)):
            assert (context.code, context.details) == (StatusCode.UNAVAILABLE, REASON)
        app = http_app(made.service)
        ready, models = await http(app, path="/readyz"), await http(app, path="/v1/models")
        assert (ready.status, ready.body.decode()) == (503, REASON)
        assert (models.status, models.error["message"]) == (503, REASON)
        # Serve tries again: what was admitted waits.
        assert not waits.done()
        said.append(("", False))
        await until(lambda: not made.service.unable)
        assert (await http(app, path="/v1/models")).status == 200
        said.append((REASON, True))
        answer = await waits
        assert (answer.status, answer.error["message"]) == (503, REASON)
        assert json.loads(answer.body)["error"]["status"] == "UNAVAILABLE"
