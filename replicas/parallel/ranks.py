"""The other ranks of a replica on several devices, as rank 0 sees them.

A rank that has failed alone leaves the others inside a sum that it never joins. So it ends itself
when rank 0 does not report the same failure within FAILED_S (see `follow`), and a thread of rank 0
looks at the ranks' processes four times a second. Once one has ended, the thread ends all others.
This breaks the sum that rank 0 waits in, long before the process group's own timeout.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

import torch.distributed as dist

from replicas.parallel.rendezvous import Channel, Store

_log = logging.getLogger("lockstep.replica")

FAILED_S = 10.0
"""Ranks fail together or not at all: all of them within this time."""
_LOOK_S = 0.25
LEAVE_S = 10.0
"""What a rank may take to end by itself."""


class ReplicaBroken(RuntimeError):
    """The ranks no longer agree, or one of them is gone: the process should be replaced."""


class RankHandle(Protocol):
    """One of the other ranks, as its starter can end it."""

    def ended(self) -> str | None:
        """How it has ended; None while it runs."""
        ...

    def kill(self) -> None:
        """End it at once; waits for nothing, and may be called by any thread and again."""
        ...

    def leave(self, within_s: float) -> None:
        """Return when it has ended by itself, or kill it after that time."""
        ...


class LocalRank:
    """A process of this machine."""

    def __init__(self, process: SpawnProcess) -> None:
        self.process = process

    def ended(self) -> str | None:
        code = self.process.exitcode
        return None if code is None else f"exit code {code}"

    def kill(self) -> None:
        self.process.kill()

    def leave(self, within_s: float) -> None:
        self.process.join(within_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's answer to a batch that raised. Ranks compare the kind of error."""

    kind: str
    message: str = field(compare=False)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(type(error).__name__, str(error))

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Ranks:
    """Ranks 1, 2, ...: one thread tells them and collects their answers, another one watches."""

    def __init__(self, store: Store, handles: Sequence[RankHandle]) -> None:
        """`store` is rank 0's; the handles are those of rank 1, 2, ... in order."""
        self._handles = list(handles)
        own = store.clone()
        self._channels = [Channel(own, rank, True) for rank in self._numbers]
        self._broken: ReplicaBroken | None = None
        self._breaking = threading.Lock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(
            target=self._watch, args=(store.clone(),), name="lockstep-ranks", daemon=True
        )
        self._watcher.start()

    @property
    def broken(self) -> ReplicaBroken | None:
        return self._broken

    def tell(self, message: object) -> None:
        """Send it to all; raises ReplicaBroken."""
        if self._broken is not None:
            raise self._broken
        for channel in self._channels:
            channel.send(message)

    def collect(self, kind: Any, within_s: float) -> list[Any]:
        """One answer of each rank in order, each a `kind` or a Failure; raises ReplicaBroken."""
        answers = []
        for rank, channel in zip(self._numbers, self._channels, strict=True):
            try:
                answers.append(channel.receive(kind | Failure | None, within_s))
            except TimeoutError:
                raise self.fail(f"rank {rank} has not answered within {within_s:g} s") from None
            if self._broken is not None:
                raise self._broken
        return answers

    def fail(self, message: str) -> ReplicaBroken:
        """Break the replica and end all ranks; returns the error to raise, the first one's.

        Residents may differ from rank to rank from now on: nothing may run any more. Any thread
        may call it.
        """
        with self._breaking:
            if self._broken is not None:
                return self._broken
            self._broken = ReplicaBroken(message)
        for handle in self._handles:
            try:
                handle.kill()
            except Exception:
                _log.exception("a rank could not be ended")
        group = dist.group.WORLD
        if group is not None and dist.get_backend(group) == "nccl":
            # Its sums do not notice that a peer has ended.
            try:
                group.abort()
            except Exception:
                _log.exception("the group of ranks could not be aborted")
        return self._broken

    def close(self) -> None:
        """End the other ranks. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._watcher.join()
        if self._broken is None:
            self.tell(None)
        for handle in self._handles:
            handle.leave(LEAVE_S)
        self._channels.clear()

    @property
    def _numbers(self) -> range:
        return range(1, len(self._handles) + 1)

    def _watch(self, store: Store) -> None:
        while not self._closing.wait(_LOOK_S):
            for rank, handle in zip(self._numbers, self._handles, strict=True):
                if (how := handle.ended()) is not None:
                    self.fail(f"rank {rank} has ended: {_last_words(store, rank) or how}")
                    break
            if self._broken is not None:
                # The thread that collects may wait for a rank that says nothing any more.
                for rank in self._numbers:
                    Channel(store, rank, False).send(None)
                return


def _last_words(store: Store, rank: int) -> Failure | None:
    """A failure that the rank has reported and rank 0 has not read."""
    try:
        said = Channel(store, rank, True).receive(object, 0.01)
    except TimeoutError:
        return None
    return Failure(**said) if isinstance(said, dict) else None
