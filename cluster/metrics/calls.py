"""What became of one call, for the log, the meter and the tracer: sizes and times, no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

    @property
    def log_fields(self) -> dict[str, Any]:
        """What the log says of it, by name."""
        return {
            "id": self.request_id,
            "status": self.status,
            "sequences": self.sequences,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "new_tokens": self.new_tokens,
            "queued_s": round(self.queued_s, 3),
            "first_token_s": round(self.to_first_token_s, 3),
            "total_s": round(self.total_s, 3),
            "tokens_per_step": round(self.tokens_per_step, 2),
            "replicas": self.replicas,
        }

    def __str__(self) -> str:
        """The line of the log. An id is the client's text: it is quoted."""
        shown = self.log_fields | {
            "id": repr(self.request_id),
            "replicas": ",".join(self.replicas) or "-",
        }
        return "request " + " ".join(f"{name}={value}" for name, value in shown.items())
