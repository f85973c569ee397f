"""One accepted request as an ingress keeps it, whichever pool serves it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from scheduler.messages import Blame, Finish, Reject, Request


@dataclass(slots=True, eq=False)
class LiveRequest:
    """An accepted request: what was delivered and whether it has ended."""

    request: Request
    deadline_s: float
    tokens: list[int]
    """All new tokens so far, those that came with the request included."""
    pool_id: str = ""
    """The id it has in the current session."""
    finish: Finish | None = None
    reject: Reject | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    sent: bool = False
    """Whether the current session's pool may know it."""
    cancelled: bool = False
    blame: Blame = field(default_factory=Blame)
    """What pools have found out about it; the next one is told."""
    recovered: int = 0
    first_s: float = 0.0
    """When the first new token came; 0 before."""
    unreachable: bool = False
    shard: int = 0
    """The shard that it was handed to."""

    @property
    def tokens_left(self) -> int:
        """How many tokens it may still get."""
        return self.request.max_new_tokens - len(self.tokens)

    def end(self) -> None:
        self.changed.set()
        self.ended.set()
