"""Who talks to the pool: what its actor remembers of a replica and of an ingress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.pool.ack_queue import Mailbox
from cluster.pool.protocol import News, ReleaseNote
from cluster.transport.line import Connection
from scheduler.messages import Batch, Finish, Interrupt, RecordFailure, ReplicaSpec

_LOST_ASKS = 5
"""How often Ray is asked about a process whose connection has ended, in the time between two
questions about others: it knows of a death a moment later than the connection."""
_STUCK_S = 1.0
"""A process that leaves Ray's question unanswered for so long does nothing."""

Probe = Callable[[Any], Awaitable[bool]]
"""Asks Ray whether the process behind a handle lives; False only when it is certainly dead."""


@dataclass(slots=True)
class ReplicaPeer:
    """One incarnation of a replica."""

    spec: ReplicaSpec
    process: Any
    """What a `Probe` understands; None: nobody can be asked."""
    heard_s: float
    mailbox: Mailbox[Batch | ReleaseNote | Interrupt]
    batches: set[int] = field(default_factory=set)
    """Dispatched and not answered."""
    draining: bool = False
    connection: Connection | None = None
    """That of its last pull; None where it came another way."""
    _asked: asyncio.Task[bool] | None = None
    _asked_s: float = 0.0

    def is_dead(self, probe: Probe | None, now_s: float, every_s: float, quiet: bool) -> bool:
        """The lease finds every death; asking Ray finds a killed process sooner.

        Ray is asked every so often, for a question costs both processes a millisecond and more.
        Not about one whose connection is there, for that ends with the process, unless it is
        `quiet`: it may hang, or its machine be gone. Never waits: the answer to one call's question
        is found by a later one.
        """
        if probe is None or self.process is None:
            return False
        if self._asked is not None and self._asked.done():
            answer, self._asked = self._asked, None
            return not answer.cancelled() and answer.exception() is None and not answer.result()
        if self.connection is not None:
            if self.connection.lost:
                every_s /= _LOST_ASKS
            elif not quiet:
                return False
        if self._asked is None and now_s - self._asked_s > every_s:
            self._asked_s = now_s
            self._asked = asyncio.ensure_future(probe(self.process))
        return False

    def is_stuck(self, now_s: float) -> bool:
        """Whether Ray has no answer from the process either."""
        return self._asked is not None and now_s - self._asked_s > _STUCK_S

    def close(self) -> None:
        self.mailbox.close()
        if self._asked is not None:
            self._asked.cancel()


@dataclass(slots=True)
class IngressPeer:
    """One session of an ingress."""

    heard_s: float
    mailbox: Mailbox[News | RecordFailure | Finish]
    requests: set[str] = field(default_factory=set)
    """Live ones."""
    unfinished: int = 0
    """Requests of its process that have not ended, in all shards, as it said last."""
