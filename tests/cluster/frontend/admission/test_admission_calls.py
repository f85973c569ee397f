"""Proves: the frontend serves known callers, counts what they use, and logs nothing that they say.

The frontend talks to a pool and a fake replica in the same event loop; contexts are fakes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2

from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from cluster.frontend.admission.control import Admitted
from cluster.frontend.admission.keys import add
from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.http_api.app import http_app
from protos import lockstep_pb2 as pb
from scheduler.messages import Batch, Priority, Request, StepResult
from tests.cluster.fakes import FakeReplica, perfect, tokenizer
from tests.cluster.frontend import rig
from tests.cluster.frontend.http_api.test_http import http
from tests.cluster.frontend.rig import (
    PROMPT,
    PROMPT_IDS,
    Context,
    both,
    frontend,
    stream,
    unfinished,
)
from tests.cluster.wire import until

AWAY = "ipv4:192.0.2.7:5000"
REQUEST = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=8)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def keyed(path: Path, **sections: Any) -> ClusterConfig:
    return from_args({"auth": {"keys_file": str(path)}, **sections})


async def calls(made: GrpcApi, **caller: str) -> list[Context]:
    """The context after each RPC that needs to know who calls."""
    status = Context(**caller)
    await made.Status(pb.StatusRequest(), status)
    return [*await both(made, REQUEST, **caller), status]


# --------------------------------------------------------------------------- who


async def test_without_keys_only_this_machine_is_served_and_health_is_open() -> None:
    async with frontend() as made:
        assert {context.code for context in await calls(made)} == {None}
        for context in await calls(made, peer=AWAY):
            assert context.code is StatusCode.UNAUTHENTICATED
            assert "lockstep keys add" in context.details
        away = Context(peer=AWAY)
        health = await made.Check(health_pb2.HealthCheckRequest(), away)
        assert (away.code, health.status) == (None, health.SERVING)


async def test_who_is_not_known_learns_nothing_of_his_request(keys: Path) -> None:
    add(keys, "alice")
    async with frontend(config=keyed(keys)) as made:
        for request in (pb.GenerateRequest(), pb.GenerateRequest(prompt="x", top_k=-1)):
            context = Context()
            await made.Generate(request, context)
            assert context.code is StatusCode.UNAUTHENTICATED


# --------------------------------------------------------------------------- what for


async def test_class_and_tenant_go_to_the_pool(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = add(keys, "alice", "high")
    sent: list[Request] = []
    async with frontend(config=keyed(keys)) as made:
        submit = made.service.router.submit
        monkeypatch.setattr(
            made.service.router, "submit", lambda r, t: (sent.append(r), submit(r, t))[1]
        )
        for priority in pb.Priority.values():
            request = pb.GenerateRequest(prompt="x", max_new_tokens=1, priority=priority)
            context = Context(f"Bearer {key}")
            await made.Generate(request, context)
            assert context.code is None
    assert {request.tenant for request in sent} == {"alice"}
    assert [request.priority for request in sent] == [
        Priority.NORMAL,  # unspecified
        Priority.HIGH,
        Priority.NORMAL,
        Priority.LOW,
    ]


# --------------------------------------------------------------------------- how much


async def test_a_request_pays_for_what_it_used(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = add(keys, "alice", tokens_per_minute=1000)
    paid: list[int] = []
    close = Admitted.close

    def noted(admitted: Admitted, tokens: int = 0) -> None:
        paid.append(tokens)
        close(admitted, tokens)

    monkeypatch.setattr(Admitted, "close", noted)
    async with frontend(config=keyed(keys)) as made:
        stop = perfect(PROMPT_IDS, 8)[3]
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=400, stop_token_ids=[stop])
        for context in await both(made, request, authorization=f"Bearer {key}"):
            assert context.code is None
    assert paid == [len(PROMPT_IDS) + perfect(PROMPT_IDS, 8).index(stop) + 1] * 2


@pytest.mark.parametrize("with_key", [True, False])
async def test_too_many_at_once_are_refused_and_every_end_makes_place(
    keys: Path, with_key: bool
) -> None:
    key = add(keys, "alice", requests_max=2)
    limit = {"frontend": {"requests_per_client_max": 2}}
    config = keyed(keys) if with_key else from_args(limit)
    authorization = f"Bearer {key}" if with_key else None
    async with frontend(step_s=0.02, config=config) as made:
        long = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=400)
        ends = [
            # cancelled, refused by name, past its deadline, ended by a stop string, served
            (long, True),
            (pb.GenerateRequest(prompt=PROMPT, top_k=-1), False),
            (pb.GenerateRequest(prompt=PROMPT, max_new_tokens=400, timeout_s=0.1), False),
            (pb.GenerateRequest(prompt=PROMPT, max_new_tokens=60, stop=["a", "e"]), False),
            (REQUEST, False),
        ]
        # And once more, when all of them have made place.
        for request, cancel in [*ends, *ends, ends[0]]:
            held = asyncio.ensure_future(made.Generate(long, Context(authorization)))
            last = asyncio.ensure_future(
                stream(made, long if cancel else request, Context(authorization))
            )
            if cancel:
                await until(lambda: unfinished(made.service) == 2)
                context = Context(authorization)
                await made.Generate(REQUEST, context)
                assert context.code is StatusCode.RESOURCE_EXHAUSTED
                assert int(context.trailing["retry-after"]) >= 1
                last.cancel()
            await asyncio.gather(last, return_exceptions=True)
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)


# --------------------------------------------------------------------------- logs and figures


class Breaking(FakeReplica):
    """Fails every step, as a model that runs out of memory does."""

    def step(self, batch: Batch, *args: Any, **options: Any) -> StepResult:
        raise MemoryError("out of memory")


MARK = "xyzzyplugh"
MINE = "it's\nmine"
LOG_LINE = re.compile(
    r"request id=.+ status=[A-Z_]+ (?P<sizes>sequences=\d+ prompt_tokens=\d+ cached_tokens=\d+"
    r" new_tokens=\d+) queued_s=(?P<queued>\d+\.\d{3}) first_token_s=(?P<first>\d+\.\d{3})"
    r" total_s=(?P<total>\d+\.\d{3}) tokens_per_step=(?P<per_step>\d+\.\d\d)"
    r" replicas=(?P<replicas>[^ ]+)"
)
"""Of a request that has ended: all its fields."""


@pytest.mark.parametrize("breaking", [False, True])
async def test_no_log_holds_what_a_client_said_or_was_told(
    breaking: bool, keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At any level, from any logger: texts, token ids, keys. Of each request that has ended there
    is one line with its id, its sizes and its times."""
    caplog.set_level(logging.DEBUG)
    key = add(keys, "alice", "low", tokens_per_minute=10**6)
    if breaking:
        monkeypatch.setattr(rig, "FakeReplica", Breaking)
    prompt = f"the {MARK} of it"
    requests = [
        pb.GenerateRequest(prompt=prompt, max_new_tokens=20, request_id=MINE, stop=[MARK]),
        pb.GenerateRequest(prompt=prompt, max_new_tokens=20, temperature=1.0, timeout_s=0.001),
        pb.GenerateRequest(prompt=prompt, top_k=-1),
        pb.GenerateRequest(prompt=prompt * 200_000),
        pb.GenerateRequest(prompt=prompt, request_id=MARK * 100),
        pb.GenerateRequest(prompt=prompt, stop=[MARK] * 100),
        pb.GenerateRequest(prompt=prompt, priority=pb.PRIORITY_HIGH),
        pb.GenerateRequest(prompt=prompt, max_new_tokens=5, priority=pb.PRIORITY_LOW),
    ]
    bodies = [
        json.dumps({"prompt": prompt, "max_new_tokens": 9}),
        f'{{"{MARK}": 1',
        f'{{"{MARK}":1}}',
    ]
    answers: list[list[int]] = []
    patient = {"failures_max": 1000}
    async with frontend(config=keyed(keys, actors=patient)) as made:
        for authorization in (f"Bearer {key}", f"Bearer {key}{MARK}"):
            for request in requests:
                answer = await made.Generate(request, Context(authorization))
                answers.append(list(answer.token_ids))
                await stream(made, request, Context(authorization))
            for body in bodies:
                app = http_app(made.service)
                await http(app, body.encode(), headers={"authorization": authorization})
        call = asyncio.ensure_future(stream(made, requests[0], Context(f"Bearer {key}")))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert any(answers) is not breaking
    told = [", ".join(map(str, tokens[:4])) for tokens in answers if tokens]
    for record in caplog.records:
        line = logging.Formatter().format(record)
        for secret in (MARK, key, key[4:], *told):
            assert secret not in line, record.name
    lines = [record.getMessage() for record in caplog.records if record.msg.startswith("request ")]
    status = "INTERNAL" if breaking else "OK"
    of_mine = [line for line in lines if line.startswith(f"request id={MINE!r} status={status} ")]
    size = len(tokenizer().encode(prompt).ids)
    new = 0 if breaking else 20
    assert len(of_mine) == 2
    for line in of_mine:
        said = LOG_LINE.fullmatch(line)
        assert said is not None, line
        assert said["sizes"] == (
            f"sequences=1 prompt_tokens={size} cached_tokens=0 new_tokens={new}"
        )
        queued_s, first_s, total_s = (float(said[name]) for name in ("queued", "first", "total"))
        assert 0 <= queued_s <= total_s
        assert 0 <= first_s <= total_s
        assert float(said["per_step"]) >= (0 if breaking else 1)
        assert breaking or said["replicas"] != "-"
    assert sum(f"id={MINE!r} status=CANCELLED" in line for line in lines) == 1


async def test_refused_calls_are_counted_by_status(keys: Path) -> None:
    key = add(keys, "alice", tokens_per_minute=15)
    counted: list[str] = []

    def sink(name: str, _value: float, tags: Mapping[str, str]) -> None:
        if name == "lockstep_calls_refused":
            counted.append(tags["status"])

    async with frontend(config=keyed(keys), sink=sink) as made:
        good = f"Bearer {key}"
        await made.Generate(REQUEST, Context())
        await made.Status(pb.StatusRequest(), Context())
        await made.Generate(pb.GenerateRequest(), Context(good))
        await stream(made, pb.GenerateRequest(prompt="x", priority=1), Context(good))
        await made.Generate(REQUEST, Context(good))
        await stream(made, REQUEST, Context(good))
        await http(http_app(made.service), b"{}")
    assert counted == [
        "UNAUTHENTICATED",
        "UNAUTHENTICATED",
        "INVALID_ARGUMENT",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "UNAUTHENTICATED",
    ]
