"""What Serve's gRPC proxy registers: handlers of the served methods that take any bytes.

The proxy parses requests, and gRPC answers what does not parse with UNKNOWN, which tells a client
nothing. With these handlers such bytes reach the frontend as `Unparsed`, which says what is wrong.
Of a method that is not registered gRPC itself says that it is UNIMPLEMENTED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from protos import lockstep_pb2 as pb

LOCKSTEP: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["Lockstep"]
_HEALTH: ServiceDescriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]


@dataclass(frozen=True, slots=True)
class Unparsed:
    """A request of so many bytes that are no message of the method's type."""

    size: int


def add_LockstepServicer_to_server(servicer: Any, server: Any) -> None:
    _add(LOCKSTEP, LOCKSTEP.methods, servicer, server)


def add_HealthServicer_to_server(servicer: Any, server: Any) -> None:
    _add(_HEALTH, [_HEALTH.methods_by_name["Check"]], servicer, server)


def _add(
    service: ServiceDescriptor, methods: Iterable[MethodDescriptor], servicer: Any, server: Any
) -> None:
    handlers = {}
    for method in methods:
        streams = method.server_streaming
        made = (
            grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        )
        parse = _parser(GetMessageClass(method.input_type).FromString)
        handlers[method.name] = made(getattr(servicer, method.name), parse)
    generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))


def _parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def tolerant(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Unparsed(len(data))

    return tolerant
