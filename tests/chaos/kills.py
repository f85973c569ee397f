"""What happens to the processes of a cluster, and when: all drawn from one seed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from benchmarks.shared.processes import Process
from tests.chaos.hosted import HostedCluster


class Kind(StrEnum):
    """One kind of trouble."""

    REPLICA = "replica"
    """SIGKILL to a replica."""
    FREEZE = "freeze"
    """SIGSTOP to a replica for longer than its lease, then SIGCONT."""
    POOL = "pool"
    FRONTEND = "frontend"
    PROXY = "proxy"
    CONTROLLER = "controller"
    SCALE = "scale"
    """One replica is drained by Serve, then one started."""


SERVER_KINDS = (Kind.REPLICA, Kind.FREEZE, Kind.POOL, Kind.CONTROLLER, Kind.SCALE)
"""Kinds that no client may notice, even one that asks only once."""

KILLED = {
    Kind.REPLICA: "replica",
    Kind.POOL: "pool",
    Kind.FRONTEND: "frontend",
    Kind.PROXY: "proxy",
    Kind.CONTROLLER: "controller",
}
"""The processes that a SIGKILL of a kind may hit."""


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
        self.error: BaseException | None = None
        self._hosted = hosted
        self._frozen_s = hosted.config.pool.lease_s + 1.5
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def striking(self, strikes: Sequence[Strike]) -> Iterator[None]:
        """Strikes while the body runs; what was frozen or scaled is as before afterwards."""
        self._over.clear()
        self._thread = threading.Thread(target=self._run, args=(strikes,), daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join(60.0)
        if self.error is not None:
            raise self.error

    def _run(self, strikes: Sequence[Strike]) -> None:
        start_s = time.monotonic()
        lasting: list[threading.Thread] = []
        try:
            for strike in strikes:
                if self._over.wait(max(start_s + strike.at_s - time.monotonic(), 0.0)):
                    break
                if strike.kind in (Kind.FREEZE, Kind.SCALE):
                    run = self._freeze if strike.kind is Kind.FREEZE else self._scale
                    lasting.append(threading.Thread(target=run, args=(strike,), daemon=True))
                    lasting[-1].start()
                else:
                    self._kill(strike)
            for thread in lasting:
                thread.join(60.0)
        except BaseException as error:
            self.error = error

    def _victim(self, strike: Strike, kind: str) -> Process | None:
        """None where there is none."""
        found = self._hosted.processes(kind)
        return found[int(strike.choice * len(found))] if found else None

    def _kill(self, strike: Strike) -> None:
        victim = self._victim(strike, KILLED[strike.kind])
        if victim is None:
            return
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.struck[strike.kind] += 1

    def _freeze(self, strike: Strike) -> None:
        victim = self._victim(strike, "replica")
        if victim is None:
            return
        try:
            os.kill(victim.pid, signal.SIGSTOP)
            self._over.wait(self._frozen_s)
        except ProcessLookupError:
            return
        finally:
            # It may have been killed while it stood still.
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)
        self.struck[strike.kind] += 1

    def _scale(self, strike: Strike) -> None:
        replicas = self._hosted.config.replicas
        try:
            self._again(lambda: self._hosted.scale(replicas - 1))
            self._over.wait(2.0 + 4.0 * strike.choice)
        finally:
            self._again(lambda: self._hosted.scale(replicas))
        self.struck[strike.kind] += 1

    @staticmethod
    def _again(call: Callable[[], None]) -> None:
        """Serve's controller may have been killed a moment ago."""
        for attempt in range(10):
            try:
                call()
                return
            except RuntimeError:
                if attempt == 9:
                    raise
                time.sleep(1.0)
