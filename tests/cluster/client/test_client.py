"""Proves: however often a stream breaks and wherever, the caller sees one stream without a gap, a
repeated token or a repeated character; what speaks of the request itself is final.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import grpc
import pytest
from grpc import StatusCode
from hypothesis import given, settings

from cluster.client import AsyncClient, Client, RetryPolicy
from cluster.client.channel import OPTIONS
from cluster.client.retry import FINAL_KEY
from protos import lockstep_pb2 as pb
from tests.cluster.fakes import perfect
from tests.cluster.scripted import (
    ACTOR_DIED,
    BREAKS,
    PROMPT,
    PROMPT_IDS,
    QUICK,
    Running,
    Script,
    Server,
    chunks_of,
    joined,
    run_server,
    worlds,
)

FINAL = [
    StatusCode.INVALID_ARGUMENT,
    StatusCode.UNAUTHENTICATED,
    StatusCode.PERMISSION_DENIED,
    StatusCode.RESOURCE_EXHAUSTED,
    StatusCode.DEADLINE_EXCEEDED,
    StatusCode.ALREADY_EXISTS,
    StatusCode.UNIMPLEMENTED,
]
BREAKING = dict.fromkeys(code for code, _ in BREAKS)
Trailing = tuple[tuple[str, str], ...]
Reads = Callable[[str, pb.GenerateRequest], tuple[list[pb.GenerateChunk], int]]
KEY = "secret"
MARKED = ((FINAL_KEY, "1"),)


@pytest.fixture(autouse=True, scope="module")
def _patient_channels() -> Iterator[None]:
    """A connection that takes a second is no break of the server's."""
    with pytest.MonkeyPatch.context() as patch:
        # Which is also for how long gRPC tries to connect.
        patient = dict(OPTIONS) | {"grpc.min_reconnect_backoff_ms": 60_000}
        patch.setattr("cluster.client.client.OPTIONS", tuple(patient.items()))
        yield


first = pytest.fixture(run_server, scope="module", name="first")


@pytest.fixture
def client(first: Running) -> Iterator[Client]:
    with Client(first.address, retry=QUICK) as made:
        yield made


def read(client: Client, request: pb.GenerateRequest) -> list[pb.GenerateChunk]:
    return list(client.stream(request))


def keys_of(script: Script) -> list[str]:
    return [metadata["authorization"] for metadata in script.metadata]


def by_blocking(address: str, request: pb.GenerateRequest) -> tuple[list[pb.GenerateChunk], int]:
    """The chunks of a stream, and how often it was asked again."""
    with Client(address, KEY, retry=QUICK) as client:
        return read(client, request), client.retries


def by_asyncio(address: str, request: pb.GenerateRequest) -> tuple[list[pb.GenerateChunk], int]:
    async def test() -> tuple[list[pb.GenerateChunk], int]:
        async with AsyncClient(address, KEY, retry=QUICK) as client, asyncio.timeout(100):
            return [chunk async for chunk in client.stream(request)], client.retries

    return asyncio.run(test())


# --------------------------------------------------------------------------- streams


@pytest.mark.parametrize("reads", [by_blocking, by_asyncio])
@settings(max_examples=100)
@given(world=worlds())
def test_a_stream_that_breaks_anywhere_reads_like_one_that_did_not(
    first: Running, reads: Reads, world: tuple[Script, pb.GenerateRequest]
) -> None:
    script, request = world
    whole, before = joined(list(chunks_of(script, request))), str(request)
    given = len(request.committed_token_ids)
    first.server.script = script
    chunks, retries = reads(first.address, request)
    assert str(request) == before, "the caller's own is left as it is"
    assert joined(chunks) == whole
    assert retries == len(script.asked) - 1
    assert keys_of(script) == [f"Bearer {KEY}"] * len(script.asked)
    assert all(chunk.text or chunk.token_ids or chunk.HasField("end") for chunk in chunks)
    assert [chunk.HasField("end") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    end = chunks[-1].end
    assert end.usage.completion_tokens == given + len(whole[1])
    # Once by the server, and as often as an attempt has brought tokens and broken.
    had = [len(asked.committed_token_ids) for asked in script.asked]
    assert end.recovered == 1 + sum(more > few for few, more in itertools.pairwise(had))
    assert [chunk.request_id for chunk in chunks] == [request.request_id] + [""] * (len(chunks) - 1)
    sampled = request.temperature > 0
    assert [chunk.HasField("seed") for chunk in chunks] == [sampled] + [False] * (len(chunks) - 1)
    for earlier, later in itertools.pairwise(script.asked):
        assert later.timeout_s < earlier.timeout_s <= request.timeout_s
        if sampled and later.committed_token_ids:
            assert later.seed == 77
    for asked in [*script.asked, request]:
        for name in ("committed_token_ids", "timeout_s", "seed"):
            asked.ClearField(name)
    assert all(asked == request for asked in script.asked)


def test_of_several_addresses_one_that_can_be_reached_is_asked_and_goes_on(first: Running) -> None:
    first.server.script = script = Script(perfect(PROMPT_IDS, 9))
    with contextmanager(run_server)() as dying:
        dying.server.script = Script(script.tokens, cuts=[(1, *BREAKS[0])])
        client = Client(f"ipv4:127.0.0.1:1,{dying.address},{first.address}", retry=QUICK)
        streaming = client.stream(pb.GenerateRequest(prompt=PROMPT))
        chunks = [next(streaming)]
    with client:
        chunks += streaming
    assert joined(chunks)[1] == script.tokens
    assert [list(asked.committed_token_ids) for asked in script.asked] == [script.tokens[:3]]


# --------------------------------------------------------------------------- what is final


@pytest.mark.parametrize(
    ("code", "trailing"),
    [*((code, ()) for code in FINAL), *((code, MARKED) for code in BREAKING)],
    ids=str,
)
@pytest.mark.parametrize("at", [0, 2])
def test_a_status_that_speaks_of_the_request_or_that_the_server_has_marked_is_final(
    first: Running, client: Client, code: StatusCode, trailing: Trailing, at: int
) -> None:
    cuts = [(at, code, "a reason")] * 2
    first.server.script = Script(perfect(PROMPT_IDS, 20), cuts=cuts, trailing=trailing)
    for call in (client.generate, functools.partial(read, client)):
        with pytest.raises(grpc.RpcError) as caught:
            call(pb.GenerateRequest(prompt=PROMPT))
        assert (caught.value.code(), caught.value.details()) == (code, "a reason")
    assert len(first.server.script.asked) == 2


@pytest.mark.parametrize(
    ("reason", "status", "raises"),
    [
        (pb.FINISH_REASON_FAILED, (StatusCode.INTERNAL, ACTOR_DIED), True),
        (pb.FINISH_REASON_FAILED, (StatusCode.UNAVAILABLE, "anything"), True),
        (pb.FINISH_REASON_LENGTH, BREAKS[0], False),
    ],
)
def test_what_comes_behind_the_last_chunk_is_an_error_where_the_server_has_failed(
    reason: int, status: tuple[StatusCode, str], raises: bool, first: Running, client: Client
) -> None:
    tokens = perfect(PROMPT_IDS, 8)
    first.server.script = script = Script(tokens, reason=reason, status_at_end=status)
    seen: list[pb.GenerateChunk] = []
    with pytest.raises(grpc.RpcError) if raises else nullcontext() as caught:
        seen.extend(client.stream(pb.GenerateRequest(prompt=PROMPT)))
    assert caught is None or caught.value.code() is status[0]
    assert joined(seen)[1] == tokens
    assert seen[-1].end.finish_reason == reason
    assert len(script.asked) == 1


# --------------------------------------------------------------------------- unary calls


def test_a_unary_call_is_repeated_with_one_seed_of_its_own(first: Running) -> None:
    cuts, seeds = [(0, *BREAKS[0]), (0, *BREAKS[2])], []
    for temperature in (0.0, 0.5, 0.5):
        first.server.script = Script(perfect(PROMPT_IDS, 9), cuts=list(cuts))
        request = pb.GenerateRequest(prompt=PROMPT, temperature=temperature, timeout_s=50)
        before = str(request)
        with Client(first.address, KEY, retry=QUICK) as client:
            answer = client.generate(request)
        assert keys_of(first.server.script) == [f"Bearer {KEY}"] * 3
        assert str(request) == before, "the caller's own is left as it is"
        asked = first.server.script.asked
        assert list(answer.token_ids) == perfect(PROMPT_IDS, 9)
        assert len(asked) == 3
        assert len({request.seed for request in asked}) == 1
        assert all(request.HasField("seed") == (temperature > 0) for request in asked)
        assert asked[0].timeout_s == 50 > asked[1].timeout_s > asked[2].timeout_s
        seeds.append(asked[0].seed)
    assert seeds[1] != seeds[2]
    # One that only the caller can know is not made up.
    first.server.script = script = Script(perfect(PROMPT_IDS, 9))
    committed = perfect(PROMPT_IDS, 2)
    with Client(first.address, retry=QUICK) as client:
        client.generate(
            pb.GenerateRequest(prompt=PROMPT, temperature=1, committed_token_ids=committed)
        )
    assert not script.asked[0].HasField("seed")


# --------------------------------------------------------------------------- bounds


def test_the_callers_timeout_bounds_all_attempts(first: Running) -> None:
    first.server.script = Script(perfect(PROMPT_IDS, 5), cuts=[(0, *BREAKS[0])] * 1000)
    policy = RetryPolicy(attempts_max=10_000, backoff_s=0.02, backoff_s_max=0.02)
    calls: list[Callable[[Client], object]] = [
        lambda client: client.generate(pb.GenerateRequest(prompt=PROMPT), timeout_s=0.15),
        lambda client: list(client.stream(pb.GenerateRequest(prompt=PROMPT), timeout_s=0.15)),
        lambda client: read(client, pb.GenerateRequest(prompt=PROMPT, timeout_s=0.15)),
    ]
    for call in calls:
        started_s = time.monotonic()
        with Client(first.address, retry=policy) as client, pytest.raises(grpc.RpcError) as caught:
            call(client)
        assert caught.value.code() in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED)
        assert time.monotonic() - started_s < 60.0
    assert first.server.script.cuts, "it gave up before the script did"


def test_a_bad_time_limit_reaches_the_server_as_it_is(first: Running) -> None:
    for timeout_s in (0.0, -1.0, 1e12):
        first.server.script = Script(perfect(PROMPT_IDS, 5))
        with Client(first.address, retry=QUICK) as client:
            client.generate(pb.GenerateRequest(prompt=PROMPT, timeout_s=timeout_s))
            read(client, pb.GenerateRequest(prompt=PROMPT, timeout_s=timeout_s))
        assert [asked.timeout_s for asked in first.server.script.asked] == [timeout_s] * 2


# --------------------------------------------------------------------------- the rest


def test_closing_a_stream_cancels_it_and_asks_nothing_more(first: Running) -> None:
    gone = threading.Event()

    class Endless(Server):
        def GenerateStream(
            self, request: pb.GenerateRequest, context: grpc.ServicerContext
        ) -> Iterator[pb.GenerateChunk]:
            self.script.asked.append(request)
            context.add_callback(gone.set)
            while not gone.is_set():
                yield pb.GenerateChunk(token_ids=[5])
                time.sleep(0.005)

    with contextmanager(run_server)(Endless()) as running:
        with Client(running.address, retry=QUICK) as client:
            streaming = client.stream(pb.GenerateRequest(prompt=PROMPT))
            next(streaming)
            streaming.close()  # type: ignore[attr-defined]
            assert gone.wait(60)
        assert len(running.server.script.asked) == 1
