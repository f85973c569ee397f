"""What became of one call, for the log, the meter and the tracer: sizes and times, no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.messages import Usage


@dataclass(frozen=True, slots=True)
class CallRecord:
    """Times are of the monotonic clock [s]; those of a stage that was not reached are 0."""

    request_id: str
    traceparent: str
    """The caller's header of that name; may be anything."""
    status: str
    sequences: int
    prompt_tokens: int
    new_tokens: int
    arrived_s: float
    submitted_s: float
    """When the first sequence went to its pool."""
    first_token_s: float
    ended_s: float
    usages: Sequence[Usage]
    """Of the sequences whose pool has told the end."""

    @property
    def cached_tokens(self) -> int:
        return sum(usage.cached_tokens for usage in self.usages)

    @property
    def queued_s(self) -> float:
        """The longest of the sequences."""
        return max((usage.queued_s for usage in self.usages), default=0.0)

    @property
    def to_first_token_s(self) -> float:
        return self.first_token_s - self.arrived_s if self.first_token_s else 0.0

    @property
    def total_s(self) -> float:
        return self.ended_s - self.arrived_s

    @property
    def tokens_per_step(self) -> float:
        steps = sum(usage.steps for usage in self.usages)
        accepted = sum(usage.accepted_tokens for usage in self.usages)
        return (accepted + steps) / steps if steps else 0.0

    @property
    def replicas(self) -> list[str]:
        return list(dict.fromkeys(name for usage in self.usages for name in usage.replicas))

    def __str__(self) -> str:
        """The line of the log. An id is the client's text: it is quoted."""
        return (
            f"request id={self.request_id!r} status={self.status} sequences={self.sequences}"
            f" prompt_tokens={self.prompt_tokens} cached_tokens={self.cached_tokens}"
            f" new_tokens={self.new_tokens} queued_s={self.queued_s:.3f}"
            f" first_token_s={self.to_first_token_s:.3f} total_s={self.total_s:.3f}"
            f" tokens_per_step={self.tokens_per_step:.2f} replicas={','.join(self.replicas) or '-'}"
        )
