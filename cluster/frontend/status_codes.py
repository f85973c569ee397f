"""The one table of status codes, and how a call that gets no answer is refused.

A code is gRPC's. The HTTP edge translates it by the same table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from grpc import StatusCode

from cluster.client.retry import FINAL_KEY, RETRY_AFTER_KEY
from cluster.frontend.admission.control import NotAllowed, Unauthenticated
from cluster.frontend.bounded import ChildrenClosed, ChildrenFailed
from cluster.pool.protocol import PoolUnreachable
from scheduler.errors import ContextExceeded, InvalidRequest, LockstepError, Overloaded
from scheduler.messages import Finish, FinishReason, RejectCode

_MESSAGE_CHARS_MAX = 1000
"""A status message travels in a header, and those are bounded."""


class Meaning(NamedTuple):
    """What a code means to a client."""

    http: int
    final: bool
    """The same request meets the same end; else it may succeed later or elsewhere."""


MEANINGS: Mapping[StatusCode, Meaning] = {
    StatusCode.INVALID_ARGUMENT: Meaning(400, final=True),
    StatusCode.UNAUTHENTICATED: Meaning(401, final=True),
    StatusCode.PERMISSION_DENIED: Meaning(403, final=True),
    StatusCode.NOT_FOUND: Meaning(404, final=True),
    StatusCode.UNIMPLEMENTED: Meaning(405, final=True),
    StatusCode.OUT_OF_RANGE: Meaning(413, final=True),
    StatusCode.ALREADY_EXISTS: Meaning(409, final=True),
    StatusCode.RESOURCE_EXHAUSTED: Meaning(429, final=False),
    StatusCode.CANCELLED: Meaning(499, final=True),
    StatusCode.INTERNAL: Meaning(500, final=True),
    StatusCode.UNAVAILABLE: Meaning(503, final=False),
    StatusCode.DEADLINE_EXCEEDED: Meaning(504, final=True),
}

CODES: Mapping[object, StatusCode] = {
    InvalidRequest: StatusCode.INVALID_ARGUMENT,
    ContextExceeded: StatusCode.INVALID_ARGUMENT,
    Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    Unauthenticated: StatusCode.UNAUTHENTICATED,
    NotAllowed: StatusCode.PERMISSION_DENIED,
    PoolUnreachable: StatusCode.UNAVAILABLE,
    ChildrenClosed: StatusCode.UNAVAILABLE,
    ChildrenFailed: StatusCode.INTERNAL,
    RejectCode.INVALID: StatusCode.INVALID_ARGUMENT,
    RejectCode.OVERLOADED: StatusCode.RESOURCE_EXHAUSTED,
    RejectCode.DUPLICATE: StatusCode.ALREADY_EXISTS,
    RejectCode.STOPPING: StatusCode.UNAVAILABLE,
    FinishReason.STOP: StatusCode.OK,
    FinishReason.LENGTH: StatusCode.OK,
    FinishReason.CANCELLED: StatusCode.CANCELLED,
    FinishReason.DEADLINE: StatusCode.DEADLINE_EXCEEDED,
    FinishReason.FAILED: StatusCode.INTERNAL,
}
"""The code of each error, each refusal of the pool and each end of a request."""

_SENTENCES: Mapping[FinishReason, str] = {
    FinishReason.CANCELLED: "the request was cancelled",
    FinishReason.DEADLINE: "timeout_s has passed",
    FinishReason.FAILED: "the request could not be finished",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call gets no answer, as a client sees it."""

    code: StatusCode
    message: str
    retry_after_s: float = 0.0
    field: str = ""
    """The field of the request that is wrong, where it is one field's fault."""
    reason: str = ""
    """OpenAI's code, where it says more than the status."""

    @property
    def short_message(self) -> str:
        """As much of the message as a header may hold, with nothing that UTF-8 cannot say."""
        message = self.message
        if len(message) > _MESSAGE_CHARS_MAX:
            message = message[:_MESSAGE_CHARS_MAX] + "..."
        return message.encode("utf-8", "replace").decode()

    @property
    def headers(self) -> list[tuple[str, str]]:
        """When to ask again, in whole seconds, where that may help."""
        if self.code not in (StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE):
            return []
        return [(RETRY_AFTER_KEY, str(max(1, math.ceil(self.retry_after_s))))]

    @property
    def trailing_metadata(self) -> list[tuple[str, str]]:
        """Of a gRPC call: `headers`, and whether the refusal is final."""
        final = [(FINAL_KEY, "1")] if MEANINGS[self.code].final else []
        return [*self.headers, *final]


class Refused(Exception):
    """Ends a call with a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refusal_of_error(error: LockstepError) -> Refusal:
    return Refusal(
        CODES.get(type(error), StatusCode.INTERNAL),
        str(error),
        error.retry_after_s if isinstance(error, Overloaded) else 0.0,
        error.field if isinstance(error, InvalidRequest | NotAllowed) else "",
        "context_length_exceeded" if isinstance(error, ContextExceeded) else "",
    )


def refusal_of_finish(finish: Finish, request_id: str, field: str) -> Refusal | None:
    """None for a request that was served in full. `request_id`: the client's name for it; `field`:
    that of the call which is at fault, if one is."""
    code = CODES[finish.reason]
    if code is StatusCode.OK:
        return None
    message = finish.message or _SENTENCES[finish.reason]
    if field:
        return Refusal(StatusCode.INVALID_ARGUMENT, f"{field}: {message}", field=field)
    return Refusal(code, f"request {request_id}: {message}" if request_id else message)
