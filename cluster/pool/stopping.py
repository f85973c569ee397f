"""Stops all pools of a server: nothing new is accepted, and what runs is waited for.

Runs where the server is stopped from, so it asks by Ray and may block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from cluster.pool.protocol import StopReply

log = logging.getLogger("lockstep.pool")

_ANSWER_S = 5.0
"""How long the pools may take to say that they cut what is unfinished."""
_STOPPING_S = 60.0
"""How long a pool stays closed after it was last told to stop. A stop that was itself killed leaves
a pool that serves again."""
_LOOK_S = 0.05


def stop_pools(actors: Sequence[ActorHandle], grace_s: float, silent_s: float) -> None:
    """Let the pools refuse what is new, and wait until they have finished the rest.

    What is unfinished after `grace_s` ends as UNAVAILABLE, so that clients go elsewhere with it.
    All pools are asked until none has anything: requests may move to one that had nothing before.
    One that hangs is asked no more after `silent_s`, the time within which every frontend talks to
    every pool: what a frontend has there counts in what it tells the others.
    """
    deadline_s = time.monotonic() + grace_s
    pools = [_StoppingPool(actor) for actor in actors]
    while pools:
        now_s = time.monotonic()
        cut = now_s >= deadline_s
        heard = [pool for pool in pools if pool.silent_for(now_s) < silent_s]
        for pool in pools:
            pool.ask(cut, now_s)
        # One that hangs must not keep the end of the grace time from the others.
        waited = [pool.asked for pool in (pools if cut else heard or pools)]
        patience_s = _ANSWER_S if cut else min(silent_s, deadline_s - now_s)
        ray.wait(waited, num_returns=len(waited), timeout=patience_s)
        for pool in pools:
            pool.look()
        if cut:
            return
        # No answer stands for those that hang where all of them do, or are gone.
        witness = any(pool.answered for pool in heard) or all(pool.gone for pool in pools)
        if witness and not any(pool.unfinished for pool in heard):
            return
        time.sleep(_LOOK_S)


class _StoppingPool:
    """One pool that is told to stop, and what is known of it."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor
        self.asked: ray.ObjectRef[StopReply] | None = None
        self._cut = False
        self._silent_since_s: float | None = None
        """When it was asked what it has not answered yet."""
        self.answered = self.gone = False
        """The last time that it was looked for."""
        self.unfinished = True
        """Whether it must be asked again; it is not so when it has nothing left, or is gone."""

    def silent_for(self, now_s: float) -> float:
        return 0.0 if self._silent_since_s is None else now_s - self._silent_since_s

    def ask(self, cut: bool, now_s: float) -> None:
        """Unless it has been asked the same and may still answer."""
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        if self.asked is None or cut != self._cut:
            self._cut = cut
            self.asked = self._actor.stop_accepting.remote(_STOPPING_S, cut)

    def look(self) -> None:
        """Take its answer, if there is one by now."""
        self.answered = self.gone = False
        self.unfinished = True
        try:
            reply = ray.get(self.asked, timeout=0)
            self.answered = True
            self.unfinished = bool(reply.unfinished) or not reply.settled
            self._silent_since_s = None
        except GetTimeoutError:
            return
        except ActorDiedError:
            self.gone, self.unfinished = True, False
        except RayError as error:
            log.warning("the pool does not answer while it is stopped: %s", error)
        self.asked = None
