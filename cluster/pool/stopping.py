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

_ANSWER_S = 1.0
"""How long the pools may take to say what is unfinished."""
_CUT_S = 5.0
"""How long they may take to cut it."""
_STOPPING_S = 60.0
"""How long a pool stays closed after it was last told to stop. A stop that was itself killed leaves
a pool that serves again."""
_LOOK_S = 0.05


def stop_pools(actors: Sequence[ActorHandle], grace_s: float) -> None:
    """Let the pools refuse what is new, and wait until they have finished the rest.

    What is unfinished after `grace_s` ends as UNAVAILABLE, so that clients go elsewhere with it.
    All pools are asked until none has anything: requests may move to one that had nothing before.
    """
    deadline_s = time.monotonic() + grace_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        if _nothing_left(actors, min(_ANSWER_S, left_s)):
            return
        time.sleep(_LOOK_S)
    _nothing_left(actors, _CUT_S, cut=True)


def _nothing_left(actors: Sequence[ActorHandle], within_s: float, cut: bool = False) -> bool:
    """Tells all pools at once, so that one that hangs keeps nothing from the others; whether each
    has said in time that nothing is unfinished."""
    asked = [actor.stop_accepting.remote(_STOPPING_S, cut) for actor in actors]
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=within_s)
    return all(map(_finished, asked))


def _finished(asked: ray.ObjectRef[StopReply]) -> bool:
    try:
        reply = ray.get(asked, timeout=0)
    except GetTimeoutError:
        return False
    except ActorDiedError:
        return True
    except RayError as error:
        log.warning("the pool does not answer while it is stopped: %s", error)
        return False
    return reply.settled and not reply.unfinished
