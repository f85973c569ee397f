"""A caller's mistake is a typed error that names the field; a broken invariant is an assertion."""

from __future__ import annotations


class LockstepError(Exception):
    """Base of every error that a caller can cause or must handle."""


class InvalidRequest(LockstepError):
    """A request that no replica could ever serve as asked."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ContextExceeded(InvalidRequest):
    """A prompt and what it asks for are longer than the context."""


class Overloaded(LockstepError):
    """The waiting queue is full; the same request may succeed after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
