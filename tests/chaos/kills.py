"""What happens to the processes of a cluster, and when: all drawn from one seed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeVar

from tests.chaos.hosted import HostedCluster

T = TypeVar("T")


class Kind(StrEnum):
    """One kind of trouble: where nothing else is said, SIGKILL to a process of this name."""

    REPLICA = "replica"
    FREEZE = "freeze"
    """SIGSTOP to a replica for longer than its lease, then SIGCONT."""
    POOL = "pool"
    FRONTEND = "frontend"
    PROXY = "proxy"
    CONTROLLER = "controller"
    SCALE = "scale"
    """One replica is drained by Serve, then one started."""
    CHANGE = "change"
    """Other settings, so that Serve replaces all replicas and frontends beside the old ones."""


SERVER_KINDS = (Kind.REPLICA, Kind.FREEZE, Kind.POOL, Kind.CONTROLLER, Kind.SCALE)
"""Kinds that no client may notice, even one that asks only once."""


@dataclass(frozen=True)
class Strike:
    """`at_s` is in seconds from the start; `choice`, in [0, 1), says which process is hit."""

    at_s: float
    kind: Kind
    choice: float


def draw_strikes(
    rng: Random, seconds: float, gap_s: tuple[float, float], kinds: Sequence[Kind]
) -> list[Strike]:
    """At random times; every kind once before any comes again. Of no kinds, none."""
    strikes: list[Strike] = []
    at_s = rng.uniform(*gap_s)
    deck: list[Kind] = []
    while kinds and at_s < seconds:
        if not deck:
            deck = rng.sample(kinds, len(kinds))
        strikes.append(Strike(at_s, deck.pop(), rng.random()))
        at_s += rng.uniform(*gap_s)
    return strikes


class Striker:
    """Carries strikes out on threads and counts those that hit."""

    def __init__(self, hosted: HostedCluster) -> None:
        self.struck: Counter[Kind] = Counter()
        self._hosted = hosted
        self._frozen_s = hosted.config.pool.lease_s + 1.5
        self._over = threading.Event()
        self._runs = {Kind.SCALE: self._scale, Kind.CHANGE: self._change}

    @contextlib.contextmanager
    def striking(self, strikes: Sequence[Strike]) -> Iterator[None]:
        """Strikes while the body runs; what was frozen or scaled is as before afterwards."""
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(self._run, strikes)
            try:
                yield
            finally:
                self._over.set()
        running.result()

    def _run(self, strikes: Sequence[Strike]) -> None:
        start_s = time.monotonic()
        with ThreadPoolExecutor() as threads:
            lasting: list[Future[None]] = []
            for strike in strikes:
                if self._over.wait(max(start_s + strike.at_s - time.monotonic(), 0.0)):
                    break
                lasting.append(threads.submit(self._runs.get(strike.kind, self._signal), strike))
        for each in lasting:
            each.result()

    def _signal(self, strike: Strike) -> None:
        """Ends a process, or has it stand still."""
        freezes = strike.kind is Kind.FREEZE
        kind = "replica" if freezes else strike.kind.value
        found = self._again(lambda: self._hosted.processes(kind))
        if not found:
            return
        pid = found[int(strike.choice * len(found))].pid
        # It may have ended by itself, or have been killed while it stood still.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if freezes else signal.SIGKILL)
            self.struck[strike.kind] += 1
            if freezes:
                self._over.wait(self._frozen_s)
                os.kill(pid, signal.SIGCONT)

    def _scale(self, strike: Strike) -> None:
        replicas = self._hosted.config.replicas
        try:
            self._again(lambda: self._hosted.scale(replicas - 1))
            self._over.wait(2.0 + 4.0 * strike.choice)
        finally:
            self._again(lambda: self._hosted.scale(replicas))
        self.struck[strike.kind] += 1

    def _change(self, strike: Strike) -> None:
        """Of the drafter, to and fro, and of frontends; returns while Serve is at it."""
        self.struck[strike.kind] += 1
        number = self.struck[strike.kind]
        self._again(lambda: self._hosted.change(number))

    @staticmethod
    def _again(call: Callable[[], T]) -> T:
        """Serve's controller may have been killed a moment ago."""
        for _ in range(9):
            try:
                return call()
            except RuntimeError:
                time.sleep(1.0)
        return call()
