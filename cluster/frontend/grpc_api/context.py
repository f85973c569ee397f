"""A gRPC call's context: which caller it names, and how it ends with a refusal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from urllib.parse import unquote

from grpc import StatusCode

from cluster.frontend.admission.control import Caller
from cluster.frontend.status_codes import Refusal


class CallContext(Protocol):
    """The part of a gRPC call's context that is used here."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...

    def peer(self) -> str: ...

    def set_code(self, code: StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...


def refuse(context: CallContext, refusal: Refusal) -> None:
    """Set the status that the call will end with."""
    context.set_code(refusal.code)
    context.set_details(refusal.short_message)
    if metadata := refusal.trailing_metadata:
        context.set_trailing_metadata(metadata)


def caller_of(context: CallContext) -> Caller:
    return Caller.from_headers(context.invocation_metadata(), _address(context.peer()))


def _address(peer: str) -> str:
    """The IP address in `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`; else empty."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest).rpartition(":")[0].strip("[]")
