"""The other ranks of a replica on several devices, as rank 0 sees them.

A rank that fails alone leaves the others inside a sum that it never joins. A thread reads what all
of them send, so it knows at once when a rank has ended, and when one has failed while rank 0
computes on. It then ends all ranks, which breaks the sums that rank 0 waits in, instead of minutes
later the process group's timeout.
"""

from __future__ import annotations

import logging
import multiprocessing
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import NoReturn, Protocol

import torch.distributed as dist

_log = logging.getLogger("lockstep.replica")

ALONE_S = 10.0
"""Ranks fail together or not at all: so long after one of them rank 0 has failed, too."""
FAILED_S = 30.0
"""And so long after rank 0 the others."""
DONE_S = 240.0
"""They end a batch together, but for what each does by itself after the last sum: filling the
draft's cache, for which a first pass may have to compile something."""
_LEAVE_S = 10.0


class ReplicaBroken(RuntimeError):
    """The ranks no longer agree, or one of them is gone: the process should be replaced."""


class RankHandle(Protocol):
    """One of the other ranks, as whoever started it can end it."""

    def ended(self) -> str | None:
        """How it has ended; None while it runs."""
        ...

    def kill(self) -> None:
        """End it at once; waits for nothing, and may be called by any thread and again."""
        ...

    def leave(self, within_s: float) -> None:
        """Return when it has ended by itself, or after so long kill it."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's answer to a batch that raised. What ranks compare is the kind of error."""

    kind: str
    message: str = field(compare=False)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(type(error).__name__, str(error))


class _Gone:
    """Stands for an answer that will never come."""


class Ranks:
    """Ranks 1, 2, ...; one thread tells them and collects their answers, another one watches."""

    def __init__(self, connections: Sequence[Connection], processes: Sequence[RankHandle]) -> None:
        self._connections = list(connections)
        self._processes = list(processes)
        self._answers: list[queue.SimpleQueue[object]] = [queue.SimpleQueue() for _ in connections]
        self._broken: ReplicaBroken | None = None
        self._breaking = threading.Lock()
        self._begun = 0
        """What all ranks do together is numbered, so that a late look takes none for another."""
        self._collecting = threading.Event()
        """Rank 0 has done its part of it."""
        self._stopped, self._stop = multiprocessing.Pipe(duplex=False)
        self._watcher = threading.Thread(target=self._watch, name="lockstep-ranks", daemon=True)
        self._watcher.start()

    @property
    def broken(self) -> ReplicaBroken | None:
        return self._broken

    def begin(self) -> None:
        """From now on the ranks do together what they answer afterwards."""
        self._begun += 1
        self._collecting.clear()

    def tell(self, message: object) -> None:
        """Send it to all; raises ReplicaBroken."""
        if self._broken is not None:
            raise self._broken
        for rank, connection in enumerate(self._connections, start=1):
            try:
                connection.send(message)
            except OSError as error:
                self.fail(f"rank {rank} is gone: {error}")

    def collect(self, timeout_s: float | None = None) -> list[object]:
        """One answer of each rank, in order; raises ReplicaBroken."""
        self._collecting.set()
        answers = []
        for rank, waiting in enumerate(self._answers, start=1):
            try:
                answers.append(waiting.get(timeout=timeout_s))
            except queue.Empty:
                self.fail(f"rank {rank} has not answered {timeout_s:g} s after rank 0 was done")
            if self._broken is not None:
                raise self._broken
        return answers

    def fail(self, message: str) -> NoReturn:
        """Residents may differ from rank to rank from now on: nothing may run any more."""
        self._break(message)
        assert self._broken is not None
        raise self._broken

    def close(self) -> None:
        """End the other ranks. A second time it does nothing."""
        if self._stop.closed:
            return
        self._stop.send(None)
        self._watcher.join()
        for connection in (*self._connections, self._stop, self._stopped):
            connection.close()
        for process in self._processes:
            process.leave(_LEAVE_S)

    # ------------------------------------------------------------------ watcher

    def _watch(self) -> None:
        failure, failed_s, begun = "", 0.0, 0
        doubtful = False
        """A rank has failed, and rank 0 computes on."""
        while True:
            left_s = max(failed_s + ALONE_S - time.monotonic(), 0.0) if doubtful else None
            ready = wait([*self._connections, self._stopped], left_s)
            if self._stopped in ready:
                return
            for rank, connection in enumerate(self._connections, start=1):
                if connection not in ready:
                    continue
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    why = f": {failure}" if failure and begun == self._begun else ""
                    self._break(f"rank {rank} has ended{why}")
                    return
                if isinstance(answer, Failure):
                    failure = f"rank {rank} failed with {answer.kind}: {answer.message}"
                    failed_s, begun = time.monotonic(), self._begun
                    doubtful = True
                self._answers[rank - 1].put(answer)
            if self._collecting.is_set() or begun != self._begun:
                doubtful = False
            elif doubtful and time.monotonic() - failed_s >= ALONE_S:
                self._break(f"{failure}, and rank 0 did not")
                return

    def _break(self, message: str) -> None:
        with self._breaking:
            if self._broken is not None:
                return
            self._broken = ReplicaBroken(message)
        for process in self._processes:
            try:
                process.kill()
            except Exception:
                _log.exception("a rank could not be ended")
        for waiting in self._answers:
            waiting.put(_Gone())
        group = dist.group.WORLD
        if group is not None and dist.get_backend(group) == "nccl":
            # Its sums do not notice that a peer has ended.
            try:
                group.abort()
            except Exception:
                _log.exception("the group of ranks could not be aborted")
