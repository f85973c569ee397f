"""A frontend with a pool and fake replicas in one event loop, and what Serve gives to an RPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from grpc import StatusCode

from cluster.config import ClusterConfig, FrontendConfig
from cluster.config_sources import from_args
from cluster.frontend.bounded_work import BoundedWork
from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.pool_session import InFlightRequest, PoolSession
from cluster.frontend.service import FrontendService
from cluster.frontend.target_text import TargetText
from cluster.metrics import FrontendMeter, Sink
from cluster.metrics.tracing import Tracer
from cluster.worker.hosted import HostedReplica
from cluster.worker.worker import Worker
from protos import lockstep_pb2 as pb
from replicas.config import ReplicaConfig
from scheduler.messages import Batch, Emit, Finish, FinishReason, StepResult
from tests.cluster.fakes import ClockAhead, FakeReplica, load_fake_text, tokenizer
from tests.cluster.wire import Wire, until

CONFIG = from_args({"frontend": {"coalesce_ms": 1}})
PROMPT = "the quick"
PROMPT_IDS = tokenizer().encode(PROMPT).ids


class Context:
    """What Serve hands to an RPC, as far as it is used."""

    def __init__(self, authorization: str | None = None, peer: str = "ipv4:127.0.0.1:5000") -> None:
        self.code: StatusCode | None = None
        self.details = ""
        self.trailing: dict[str, str] = {}
        self._peer = peer
        self._metadata = [] if authorization is None else [("authorization", authorization)]

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return [*self._metadata]

    def peer(self) -> str:
        return self._peer

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        self.trailing = dict(trailing_metadata)

    def set_code(self, code: StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


_shared: dict[tuple[object, ...], BoundedWork] = {}
_SHARED_MAX = 4


def shared_work(text: TargetText, config: FrontendConfig) -> BoundedWork:
    """For tests one after another: to start child processes takes longer than most tests."""
    key = (id(text.tokenizer), id(text.encoder), text.embedding_size, text.eos_token_ids, config)
    if key not in _shared:
        if len(_shared) == _SHARED_MAX:
            _shared.pop(next(iter(_shared))).close()
        _shared[key] = BoundedWork(text, config)
    return _shared[key]


class Late(FakeReplica):
    """At every sixth batch all that the pool has is past its deadline, by the pool's clock."""

    def __init__(self, clock: ClockAhead) -> None:
        super().__init__()
        self._clock = clock
        self._batches = 0

    def step(self, batch: Batch, *rest: Any) -> StepResult:
        result = super().step(batch, *rest)
        self._batches += 1
        if self._batches % 6 == 0:
            self._clock.ahead_s += 2 * CONFIG.frontend.timeout_s
        return result


@asynccontextmanager
async def frontend(
    step_s: float = 0.0,
    config: ClusterConfig = CONFIG,
    replicas: int = 1,
    load: Callable[[], HostedReplica] | None = None,
    text: TargetText | None = None,
    bound_s: float = 100.0,
    clock: Callable[[], float] = time.monotonic,
    sink: Sink = lambda _name, _value, _tags: None,
    shares: bool = True,
    tracer: Tracer | None = None,
) -> AsyncIterator[GrpcApi]:
    """`load` and `text`: of a real replica, in place of the fake ones; `clock`: the pool's; `sink`
    takes what the frontend counts; `shares`: child processes with frontends of other tests."""
    pool = Wire(config, clock=clock)
    load = load or (lambda: FakeReplica(step_s))
    runners = [Worker(config, load, [pool], f"r{n}") for n in range(replicas)]
    text = text or load_fake_text(ReplicaConfig())
    bounded = shared_work(text, config.frontend) if shares else None
    meter = FrontendMeter(sink)
    service = FrontendService(config, [pool], text, "frontend", meter, bounded, tracer=tracer)
    made = GrpcApi(service)
    async with asyncio.timeout(bound_s):
        for runner in runners:
            await runner.start()
        await until(lambda: len(pool.replicas) == replicas)
        made.service.start()
        await until(lambda: made.service.ready() or not replicas)
        yield made
        await made.close()
        for runner in runners:
            runner.end()
        pool.close()


async def stream(
    made: GrpcApi, request: pb.GenerateRequest, context: Context
) -> list[pb.GenerateChunk]:
    return [chunk async for chunk in made.GenerateStream(request, context)]


def pool_of(made: GrpcApi) -> Wire:
    """The one that `frontend` has made."""
    [pool] = made.service.router.pools
    assert isinstance(pool, Wire)
    return pool


def unfinished(service: FrontendService) -> int:
    """Sequences whose end the frontend has not told yet."""
    return service.router.unfinished


def session_of(made: GrpcApi) -> PoolSession:
    """The only one."""
    [session] = made.service.router.sessions
    return session


async def both(made: GrpcApi, request: pb.GenerateRequest, **caller: str) -> list[Context]:
    """The contexts of a unary call and of a stream of this request."""
    unary, streamed = Context(**caller), Context(**caller)
    await made.Generate(request, unary)
    await stream(made, request, streamed)
    return [unary, streamed]


def text_of(tokens: list[int]) -> str:
    return tokenizer().decode(PROMPT_IDS + tokens)[len(PROMPT) :]


async def asked(made: GrpcApi) -> InFlightRequest:
    """The one request that the frontend has sent to the pool."""
    await until(lambda: [live.sent_s is None for live in session_of(made).unfinished] == [False])
    return next(iter(session_of(made).unfinished))


def brings(made: GrpcApi, live: InFlightRequest, tokens: list[int]) -> None:
    pool_of(made).say(Emit(live.pool_id, len(live.tokens), tuple(tokens)))


def ends(made: GrpcApi, live: InFlightRequest, reason: FinishReason) -> None:
    pool_of(made).say(Finish(live.pool_id, reason))
