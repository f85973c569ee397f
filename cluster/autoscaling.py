"""Serve's side of autoscaling: asks the pool for its load and lets the pure policy decide.

Serve's controller makes one `PoolPolicy` for the replica deployment and calls it in its control
loop, ten times a second. Replicas cannot report while there are none, and Serve hears of a custom
figure only every ten seconds; so the policy asks the pool's actor, which lives as long as a
frontend does. It asks on a thread of its own and never waits: between two answers the number stays.

Serve takes the class's code along by value, and the modules that it imports from the environment of
the controller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import ray
from ray.serve.config import AutoscalingConfig as ServeAutoscaling, AutoscalingPolicy

from cluster.config import ClusterConfig
from cluster.pool.protocol import NAMESPACE
from scheduler.scaling import (
    LOOK_S,
    AutoscalingConfig,
    CapacityMeter,
    ScalingState,
    merged_status,
    unseen,
    wanted_replicas,
)
from scheduler.status import PoolStatus

log = logging.getLogger("ray.serve")

_ANSWER_S = 2.0
"""How long a look waits for answers."""


class Context(Protocol):
    """The part of Serve's AutoscalingContext that is used here."""

    target_num_replicas: int


class PoolPolicy:
    """How many replicas there should be, from what the pool says of its load. Never raises."""

    def __init__(
        self,
        pool_names: Sequence[str],
        autoscaling: Mapping[str, Any],
        rows_max: int,
        ask: Callable[[], Sequence[PoolStatus]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`autoscaling` holds the fields of AutoscalingConfig; `ask` gets the status of each shard,
        and may block and may raise."""
        self.config = AutoscalingConfig.model_validate(dict(autoscaling))
        self._ask = ask or Pools(pool_names)
        self._clock = clock
        self._meter = CapacityMeter(self.config.tokens_per_s, rows_max)
        self._state = ScalingState()
        # Its thread ends with this object.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lockstep-autoscaling")
        self.answer: Future[Sequence[PoolStatus]] | None = None
        """What the shards were asked; None where nothing is under way."""
        self._asked_s = float("-inf")
        self._answers = False

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and what Serve should remember for us: nothing."""
        wanted = context.target_num_replicas
        try:
            shards = self._new_answer()
            return (wanted if shards is None else self._decide(shards, wanted)), {}
        except Exception:
            log.exception("the autoscaling policy failed; the number of replicas stays")
            return wanted, {}

    def _new_answer(self) -> Sequence[PoolStatus] | None:
        """The pool's answer when there is a new one; asks again when it is time."""
        now_s = self._clock()
        answer = self.answer
        if answer is None:
            if now_s - self._asked_s >= LOOK_S:
                self._asked_s = now_s
                self.answer = self._thread.submit(self._ask)
            return None
        if not answer.done():
            return None
        self.answer = None
        error = answer.exception()
        if (error is None) != self._answers:
            self._answers = error is None
            if error is None:
                log.info("autoscaling: the pool answers")
            else:
                log.warning("autoscaling: the pool does not answer: %s", error)
        if error is not None:
            self._state = unseen(self._state, now_s)
            return None
        return answer.result()

    def _decide(self, shards: Sequence[PoolStatus], wanted: int) -> int:
        status = merged_status(shards)
        tokens_per_s = self._meter.look(*shards)
        number, self._state = wanted_replicas(
            self.config, status, tokens_per_s, wanted, self._state, self._clock()
        )
        if number != wanted:
            log.info(
                "autoscaling: %d -> %d replicas; %d serve, %d tokens are outstanding, "
                "%.0f/s are committed, one replica commits %.0f/s",
                *(wanted, number, status.serving, status.outstanding_tokens),
                *(status.tokens_per_s, tokens_per_s),
            )
        return number


class Pools:
    """Asks the pool's actors and waits for their answers; finds them again after a failure."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._actors: list[Any] = []

    def __call__(self) -> list[PoolStatus]:
        """Of each shard. Raises what Ray raises where one of them does not answer."""
        try:
            self._actors = self._actors or [
                ray.get_actor(name, namespace=NAMESPACE) for name in self._names
            ]
            asked = [actor.status.remote() for actor in self._actors]
            return [view.status for view in ray.get(asked, timeout=_ANSWER_S)]
        except Exception:
            self._actors = []
            raise


def serve_autoscaling(config: ClusterConfig) -> ServeAutoscaling | None:
    """The replica deployment's option for Serve; None where the number is fixed."""
    ours = config.autoscaling
    if ours is None:
        return None
    return ServeAutoscaling(
        min_replicas=ours.min_replicas,
        max_replicas=ours.max_replicas,
        # All delays are the policy's own; it sees the load more often than Serve's averages.
        upscale_delay_s=0,
        downscale_delay_s=0,
        downscale_to_zero_delay_s=0,
        policy=AutoscalingPolicy(
            policy_function=f"{__name__}:{PoolPolicy.__name__}",
            policy_kwargs={
                "pool_names": config.pool_names,
                "autoscaling": ours.model_dump(),
                "rows_max": config.scheduler.rows_max,
            },
        ),
    )
