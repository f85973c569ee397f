"""Proves: the frontend serves known callers, counts what they use, and logs nothing that they say.

The frontend talks to a pool and a fake replica in the same event loop; contexts are fakes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from cluster.frontend.admission.control import AdmissionControl, Admitted, Caller
from cluster.frontend.admission.keys import add
from cluster.frontend.http_api.app import http_app
from protos import lockstep_pb2 as pb
from scheduler.errors import Overloaded
from scheduler.messages import Batch, Priority, Request, StepResult
from tests.cluster.fakes import FakeReplica, perfect, tokenizer
from tests.cluster.frontend import rig
from tests.cluster.frontend.http_rig import http
from tests.cluster.frontend.rig import CONFIG, PROMPT, PROMPT_IDS, Context, both, frontend, stream


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def keyed(path: Path, **sections: Any) -> ClusterConfig:
    return from_args({"auth": {"keys_file": str(path)}, **sections})


# --------------------------------------------------------------------------- what for


async def test_what_a_call_is_goes_to_the_pool(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = add(keys, "alice", "high")
    sent: list[tuple[Request, float]] = []
    async with frontend(config=keyed(keys)) as made:
        submit = made.service.router.submit
        monkeypatch.setattr(
            made.service.router, "submit", lambda r, t: (sent.append((r, t)), submit(r, t))[1]
        )
        for priority in pb.Priority.values():
            request = pb.GenerateRequest(prompt="x", max_new_tokens=1, priority=priority)
            context = Context(f"Bearer {key}")
            await made.Generate(request, context)
            assert context.code is None
    # What has passed since the call came is not left.
    assert all(0 < left_s < CONFIG.frontend.timeout_s for _, left_s in sent)
    assert {request.tenant for request, _ in sent} == {"alice"}
    assert [request.priority for request, _ in sent] == [
        Priority.NORMAL,  # unspecified
        Priority.HIGH,
        Priority.NORMAL,
        Priority.LOW,
    ]


# --------------------------------------------------------------------------- how much


async def test_a_request_pays_for_what_it_used(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = add(keys, "alice", tokens_per_minute=1000)
    paid: list[int] = []
    settle = Admitted.__exit__

    def noted(admitted: Admitted, *error: object) -> None:
        paid.append(admitted.used)
        settle(admitted, *error)

    monkeypatch.setattr(Admitted, "__exit__", noted)
    async with frontend(config=keyed(keys)) as made:
        stop = perfect(PROMPT_IDS, 8)[3]
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=400, stop_token_ids=[stop])
        for context in await both(made, request, authorization=f"Bearer {key}"):
            assert context.code is None
    assert paid == [len(PROMPT_IDS) + perfect(PROMPT_IDS, 8).index(stop) + 1] * 2


def test_a_call_that_uses_more_than_was_expected_leaves_a_debt(keys: Path) -> None:
    caller = Caller((f"Bearer {add(keys, 'alice', tokens_per_minute=600)}",))
    config = keyed(keys)
    control = AdmissionControl(config.auth, config.frontend, clock=lambda: 0.0)
    with control.admit(caller) as admitted:
        admitted.charge(300)
        admitted.used = 700
    with pytest.raises(Overloaded):
        control.admit(caller)


# --------------------------------------------------------------------------- logs


class Breaking(FakeReplica):
    """Fails every step, as a model that runs out of memory does."""

    def probe(self) -> None: ...

    def step(self, batch: Batch, *args: Any, **options: Any) -> StepResult:
        raise MemoryError("out of memory")


MARK = "xyzzyplugh"
MINE = "it's\nmine"
LOGGED = ["id", "status", "sequences", "prompt_tokens", "cached_tokens", "new_tokens", "queued_s"]
LOGGED += ["first_token_s", "total_s", "tokens_per_step", "replicas"]
"""Of a request that has ended."""


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
    async with frontend(config=keyed(keys)) as made:
        for authorization in (f"Bearer {key}", f"Bearer {key}{MARK}"):
            for request in requests:
                context = Context(authorization)
                answer = await made.Generate(request, context)
                unknown = context.code is StatusCode.UNAUTHENTICATED
                assert unknown is authorization.endswith(MARK), "whatever is wrong with the request"
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
    told = [", ".join(map(str, tokens[:4])) for tokens in answers if len(tokens) > 3]
    for record in caplog.records:
        line = logging.Formatter().format(record)
        for secret in (MARK, key, key[4:], *told):
            assert secret not in line, record.name
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("request ")
    ]
    status = "INTERNAL" if breaking else "OK"
    of_mine = [line for line in lines if line.startswith(f"request id={MINE!r} status={status} ")]
    size = len(tokenizer().encode(prompt).ids)
    new = 0 if breaking else 20
    assert len(of_mine) == 2
    for line in of_mine:
        said = dict(re.findall(r"(\w+)=(\S+)", line))
        assert list(said) == LOGGED
        sizes = [said[name] for name in LOGGED[2:6]]
        assert sizes == ["1", str(size), "0", str(new)]
        queued_s, first_s, total_s = (float(said[name]) for name in LOGGED[6:9])
        assert 0 <= queued_s <= total_s
        assert 0 <= first_s <= total_s
        assert float(said["tokens_per_step"]) >= (0 if breaking else 1)
        assert breaking or said["replicas"] != "-"
    assert sum(f"id={MINE!r} status=CANCELLED" in line for line in lines) == 1
