"""Health as grpc.health.v1 asks for it. Open to everybody: it tells nothing of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from grpc import StatusCode
from grpc_health.v1 import health_pb2

from cluster.frontend.grpc_api.context import CallContext, refuse
from cluster.frontend.grpc_api.handlers import Unparsed
from cluster.frontend.status_codes import Refusal
from protos import lockstep_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Lockstep"].full_name

_KNOWN = ("", SERVICE)
_STATES = health_pb2.HealthCheckResponse
_UNKNOWN = _STATES(status=_STATES.SERVICE_UNKNOWN)
_WATCH_S = 1.0
"""How often a health watch looks; that the server stops it hears at once."""
_WATCHES_MAX = 200
"""Open at once in this process."""
_NO_HEALTH_REQUEST = Refusal(
    StatusCode.INVALID_ARGUMENT, "request: no grpc.health.v1.HealthCheckRequest"
)


class HealthService:
    """The RPCs by their names, as Serve's proxy calls them."""

    def __init__(self, ready: Callable[[], bool], stopping: asyncio.Event) -> None:
        """`stopping` is set while the server accepts no new request."""
        self._ready = ready
        self._stopping = stopping
        self._watches = 0
        self._closing = asyncio.Event()

    def end_watches(self) -> None:
        """An open watch would hold up the end of this process for the whole grace time."""
        self._closing.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest | Unparsed, grpc_context: CallContext
    ) -> health_pb2.HealthCheckResponse:
        if isinstance(request, Unparsed):
            refuse(grpc_context, _NO_HEALTH_REQUEST)
        elif request.service not in _KNOWN:
            refuse(grpc_context, Refusal(StatusCode.NOT_FOUND, "service: unknown"))
        else:
            return self._health()
        return health_pb2.HealthCheckResponse()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest | Unparsed, grpc_context: CallContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if isinstance(request, Unparsed):
            refuse(grpc_context, _NO_HEALTH_REQUEST)
        elif self._watches >= _WATCHES_MAX:
            # Anybody may watch, so watches must not keep requests out.
            refuse(grpc_context, Refusal(StatusCode.RESOURCE_EXHAUSTED, "too many health watches"))
        else:
            self._watches += 1
            try:
                async for answer in self._watch(request):
                    yield answer
            finally:
                self._watches -= 1
            return
        yield health_pb2.HealthCheckResponse()

    async def _watch(
        self, request: health_pb2.HealthCheckRequest
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last: health_pb2.HealthCheckResponse | None = None
        while True:
            now = self._health() if request.service in _KNOWN else _UNKNOWN
            if last is None or now.status != last.status:
                last = now
                yield now
            if self._closing.is_set() or self._stopping.is_set():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_S):
                    await self._stopping.wait()

    async def List(
        self, request: health_pb2.HealthListRequest, grpc_context: CallContext
    ) -> health_pb2.HealthListResponse:
        health = self._health()
        return health_pb2.HealthListResponse(statuses={"": health, SERVICE: health})

    def _health(self) -> health_pb2.HealthCheckResponse:
        return _STATES(status=_STATES.SERVING if self._ready() else _STATES.NOT_SERVING)
