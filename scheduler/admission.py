"""Which requests come in: none that cannot be served, and none that would wait for too long."""

from __future__ import annotations

from scheduler.errors import InvalidRequest
from scheduler.messages import Reject, RejectCode, Request, Submit
from scheduler.state import Pool
from scheduler.validation import check_request

_RETRY_AFTER_S = (1.0, 60.0)
"""Least and most that a refused client is told to wait."""
_RETRY_UNKNOWN_S = 5.0
"""The same while nothing was committed lately."""


def refusal(event: Submit, pool: Pool, now_s: float) -> Reject | None:
    """Why the request does not come in, if it does not."""
    request = event.request
    if request.id in pool.sequences:
        return Reject(request.id, RejectCode.DUPLICATE, "id", "a request with this id is live")
    try:
        check_request(request, pool.config)
        if not event.validated:
            check_servable(request, pool)
    except InvalidRequest as error:
        return Reject(request.id, RejectCode.INVALID, error.field, error.reason)
    message = "" if event.admitted_before else _overload(request, pool)
    if message:
        return Reject(request.id, RejectCode.OVERLOADED, "", message, _retry_after_s(pool, now_s))
    return None


def check_servable(request: Request, pool: Pool) -> None:
    """Raises InvalidRequest if there are replicas and every one refuses the request."""
    refused: InvalidRequest | None = None
    for spec in pool.specs:
        try:
            check_request(request, pool.config, spec)
            return
        except InvalidRequest as error:
            refused = refused or error
    if refused is not None:
        raise refused


def _overload(request: Request, pool: Pool) -> str:
    """Why the queue has no room for the request; empty if it has."""
    waiting, config = pool.waiting, pool.config
    if len(waiting) >= config.waiting_requests_max:
        return f"{len(waiting)} requests wait already"
    # One that is longer than the whole bound comes in when no other waits.
    if waiting and waiting.tokens + request.length_expected > config.waiting_tokens_max:
        return f"requests of {waiting.tokens} tokens wait already"
    return ""


def _retry_after_s(pool: Pool, now_s: float) -> float:
    """When a tenth of the queue will be gone, at the present rate."""
    rate = pool.rate.per_s(now_s)
    if rate <= 0:
        return _RETRY_UNKNOWN_S
    wait_s = 0.1 * pool.expected(pool.waiting.tokens_left) / rate
    return min(max(wait_s, _RETRY_AFTER_S[0]), _RETRY_AFTER_S[1])
