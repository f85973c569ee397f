"""What the pool's actor remembers of a worker and of a frontend that talk to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.pool.protocol import FrontendMessage, PoolState, WorkerMessage
from cluster.transport import Stream
from scheduler.messages import Batch, Cancel, ReplicaSpec, Submit

_ASK_S = 0.1
"""How often Ray is asked about a process in doubt: it knows of a death a moment later than the
stream, and each question costs both processes a millisecond and more."""
_STUCK_S = 1.0
"""A process that leaves Ray's question unanswered for so long does nothing."""

Probe = Callable[[Any], Awaitable[bool | None]]
"""Asks Ray whether the process behind a handle lives; None: it cannot tell."""


@dataclass(slots=True, eq=False)
class WorkerPeer:
    """One membership of a replica."""

    spec: ReplicaSpec
    process: Any
    """What a `Probe` understands; None: nothing can be asked."""
    heard_s: float
    batches: dict[int, Batch] = field(default_factory=dict)
    """Dispatched and not answered."""
    draining: bool = False
    stream: Stream | None = None
    lost_stream: bool = False
    _waiting: list[WorkerMessage] = field(default_factory=list)
    """What came before the stream, or is of the event in hand."""
    _asked: asyncio.Task[bool | None] | None = None
    _asked_s: float = 0.0
    _answer: bool | None = None

    def post(self, message: WorkerMessage) -> None:
        self._waiting.append(message)

    def flush(self) -> None:
        if self.stream is not None and self._waiting:
            waiting, self._waiting = self._waiting, []
            self.stream.send(*waiting)

    def loss(self, probe: Probe | None, now_s: float, lease_s: float) -> tuple[str, bool] | None:
        """Why it is lost, if it is, and whether that counts against the batches in hand.

        The lease finds every death; the end of the stream, and Ray, find most of them sooner. A
        death counts. A lost stream does not, nor does silence: both may be the network's. Unless
        Ray, too, has no answer: then the process is stuck, or dead and Ray does not know it yet.
        """
        silent_s = now_s - self.heard_s
        if not self.lost_stream and silent_s <= lease_s / 2:
            self._ask_no_more()
            return None
        lives = self._lives(probe, now_s)
        if lives is False:
            return "has died", True
        if silent_s > lease_s:
            return f"is silent for {silent_s:.1f} s", not lives
        return ("has lost its stream", False) if lives and self.lost_stream else None

    def _lives(self, probe: Probe | None, now_s: float) -> bool | None:
        """What Ray says of the process; None: it has no answer. Never waits: the answer to one
        call's question is found by a later one."""
        if probe is None or self.process is None:
            return True
        if self._asked is not None and self._asked.done():
            asked, self._asked = self._asked, None
            self._answer = None if asked.cancelled() or asked.exception() else asked.result()
        elif self._asked is not None and now_s - self._asked_s > _STUCK_S:
            self._answer = None
        if self._asked is None and now_s - self._asked_s > _ASK_S:
            self._asked_s = now_s
            self._asked = asyncio.ensure_future(probe(self.process))
        return self._answer

    def _ask_no_more(self) -> None:
        """It is well: what Ray said of it counts no more."""
        self._answer = None
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None

    def close(self) -> None:
        self._ask_no_more()
        if self.stream is not None:
            self.stream.end()


@dataclass(slots=True, eq=False)
class FrontendPeer:
    """One session of a frontend."""

    stream: Stream
    heard_s: float
    state: Callable[[int], PoolState]
    """What the pool says of itself to a session that has sent so many requests."""
    requests: set[str] = field(default_factory=set)
    """Live ones."""
    unfinished: int = 0
    """Requests of its process that have not ended, in all shards, as it said last."""
    submits: int = 0
    """Requests that it has sent."""
    lost: bool = False
    """Nothing is sent any more."""
    _waiting: list[FrontendMessage] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None

    def post(self, message: FrontendMessage) -> None:
        self._waiting.append(message)

    def flush_within(self, within_s: float) -> None:
        """Send what waits, together with what comes until then."""
        if within_s <= 0:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(within_s, self.flush)

    def flush(self) -> None:
        """Send what waits and the pool's state now."""
        if self.lost:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        self.stream.send(*waiting, self.state(self.submits))

    def close(self) -> None:
        self.lost = True
        if self._timer is not None:
            self._timer.cancel()
        self.stream.end()


def unlike(spec: ReplicaSpec, other: ReplicaSpec, other_id: str) -> str | None:
    """Why a replica's output may differ from another one's of the same pool."""
    if (other.target, other.dtype) != (spec.target, spec.dtype):
        return (
            f"it serves {spec.target} in {spec.dtype}, but {other_id} of this pool "
            f"serves {other.target} in {other.dtype}"
        )
    if other.fingerprint != spec.fingerprint:
        return (
            f"its weights or its arithmetic are not those of {other_id} of this pool:"
            f" fingerprint {spec.fingerprint} ({spec.arithmetic}), not {other.fingerprint}"
            f" ({other.arithmetic})"
        )
    return None


def requests_of(event: object, batch: Batch | None) -> tuple[str, ...]:
    """The requests that an event is about."""
    if isinstance(event, Submit):
        return (event.request.id,)
    if isinstance(event, Cancel):
        return (event.request_id,)
    return tuple(batch.row_ids) if batch is not None else ()
