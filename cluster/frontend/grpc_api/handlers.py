"""What Serve's gRPC proxy registers: the generated handlers, but they take any bytes.

The proxy parses requests, and gRPC answers what does not parse with UNKNOWN, which tells a client
nothing. With these handlers such bytes reach the frontend as `Unparsed`, which says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server as _add_health

from protos.lockstep_pb2_grpc import add_LockstepServicer_to_server as _add_lockstep


@dataclass(frozen=True, slots=True)
class Unparsed:
    """A request of so many bytes that are no message of the method's type."""

    size: int


def add_LockstepServicer_to_server(servicer: Any, server: Any) -> None:
    _add_lockstep(servicer, _Tolerant(server))  # type: ignore[no-untyped-call]


def add_HealthServicer_to_server(servicer: Any, server: Any) -> None:
    _add_health(servicer, _Tolerant(server))


class _Tolerant:
    """A server whose handlers take any bytes."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for handler in handlers:
            # The generated class keeps its methods here, and Serve itself looks for them here.
            handler._method_handlers = _tolerant(handler._method_handlers)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        self._server.add_registered_method_handlers(service, _tolerant(handlers))


def _tolerant(handlers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: handler._replace(request_deserializer=_parser(handler.request_deserializer))
        for name, handler in handlers.items()
    }


def _parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def tolerant(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Unparsed(len(data))

    return tolerant
