"""What a call brings along, and how it is refused; the same for gRPC and HTTP.

Knows the transports' headers and statuses, and nothing of what is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote

from grpc import StatusCode

from cluster.frontend.admission.control import Caller

_FORWARDED = frozenset({"forwarded", "x-forwarded-for", "x-real-ip"})
"""With one of these the peer speaks for somebody else, who may be anywhere."""
_MESSAGE_CHARS_MAX = 1000
"""A status message travels in a header, and those are bounded."""


class CallContext(Protocol):
    """The part of a gRPC call's context that is used here."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...

    def peer(self) -> str: ...

    def set_code(self, code: StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call gets no answer, as a client sees it."""

    code: StatusCode
    message: str
    retry_after_s: float = 0.0

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Trailing metadata, and headers over HTTP: whoever is told to come back is told when."""
        if self.code is not StatusCode.RESOURCE_EXHAUSTED:
            return []
        return [("retry-after", str(max(1, math.ceil(self.retry_after_s))))]


class Refused(Exception):
    """Ends a call with a status."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refuse(context: CallContext, refusal: Refusal) -> None:
    """Set the status that the call will end with."""
    context.set_code(refusal.code)
    context.set_details(short(refusal.message))
    if headers := refusal.headers:
        context.set_trailing_metadata(headers)


def short(message: str) -> str:
    """As much of a message as may go into a header, with nothing that UTF-8 cannot say."""
    if len(message) > _MESSAGE_CHARS_MAX:
        message = message[:_MESSAGE_CHARS_MAX] + "..."
    return message.encode("utf-8", "replace").decode()


def caller_of(context: CallContext) -> Caller:
    """Who makes this gRPC call."""
    return _caller(context.invocation_metadata(), _address(context.peer()))


def caller_of_http(headers: Sequence[tuple[str, str]], address: str) -> Caller:
    """Who makes this HTTP request; names of headers in lower case."""
    return _caller(headers, address)


def _caller(headers: Iterable[tuple[str, str | bytes]], address: str) -> Caller:
    authorization, forwarded = [], False
    for name, value in headers:
        if name == "authorization" and isinstance(value, str):
            authorization.append(value)
        forwarded |= name in _FORWARDED
    return Caller(tuple(authorization), address, forwarded)


def _address(peer: str) -> str:
    """The IP address in `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`; else empty."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest).rpartition(":")[0].strip("[]")
