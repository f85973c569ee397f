"""Who talks to the pool: what its actor remembers of a replica and of a frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.pool.ack_queue import AckQueue
from cluster.pool.protocol import InterruptNote, ReleaseNote, Update
from cluster.transport.endpoint import Peer
from scheduler.messages import Batch, ReplicaSpec

_LOST_ASKS = 5
"""How often Ray is asked about a process whose stream has ended, in the time between two questions
about others: it knows of a death a moment later than the stream."""
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
    work: AckQueue[Batch | ReleaseNote | InterruptNote]
    batches: dict[int, Batch] = field(default_factory=dict)
    """Dispatched and not answered."""
    draining: bool = False
    stream: Peer | None = None
    """That of its last pull; None before."""
    _asked: asyncio.Task[bool] | None = None
    _asked_s: float = 0.0

    def is_dead(self, probe: Probe | None, now_s: float, every_s: float, quiet: bool) -> bool:
        """The lease finds every death; asking Ray finds a killed process sooner.

        Ray is asked every so often, for a question costs both processes a millisecond and more.
        Not about one whose stream is there, for that ends with the process, unless it is `quiet`:
        it may hang, or its machine be gone. Never waits: the answer to one call's question is found
        by a later one.
        """
        if probe is None or self.process is None:
            return False
        if self._asked is not None and self._asked.done():
            answer, self._asked = self._asked, None
            return not answer.cancelled() and answer.exception() is None and not answer.result()
        if self.stream is not None:
            if self.stream.lost:
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
        self.work.close()
        if self._asked is not None:
            self._asked.cancel()


@dataclass(slots=True)
class FrontendPeer:
    """One session of a frontend."""

    heard_s: float
    updates: AckQueue[Update]
    requests: set[str] = field(default_factory=set)
    """Live ones."""
    unfinished: int = 0
    """Requests of its process that have not ended, in all shards, as it said last."""
