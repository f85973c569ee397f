"""Serve's side of autoscaling: asks the pool for its load and lets the pure policy decide.

Serve's controller makes one `PoolPolicy` for the replica deployment and calls it in its control
loop, ten times a second. Replicas cannot report while there are none, and Serve hears of a custom
figure only every ten seconds; so the policy asks the pool's actor, which lives as long as an
ingress does. It asks on a thread of its own and never waits: between two answers the number stays.

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
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingPolicy

from cluster.config import ClusterConfig
from scheduler.autoscaling import (
    AutoscalingConfig,
    CapacityMeter,
    ScalingState,
    pool_load,
    wanted_replicas,
)
from scheduler.sharding import merged_status
from scheduler.status import PoolStatus

log = logging.getLogger("ray.serve")

_ANSWER_S = 5.0
"""How long the pool may take to answer."""


class Context(Protocol):
    """The part of Serve's AutoscalingContext that is used here."""

    target_num_replicas: int


class PoolPolicy:
    """How many replicas there should be, from what the pool says of its load. Never raises."""

    def __init__(
        self,
        pool_names: Sequence[str],
        namespace: str,
        autoscaling: Mapping[str, Any],
        rows_max: int,
        ask: Callable[[], PoolStatus] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`autoscaling` holds the fields of AutoscalingConfig; `ask` may block and may raise."""
        self._config = AutoscalingConfig.model_validate(dict(autoscaling))
        self._ask = ask or _Pools(pool_names, namespace)
        self._clock = clock
        self._meter = CapacityMeter(self._config.tokens_per_s, rows_max)
        self._state = ScalingState()
        # Its thread ends with this object.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lockstep-autoscaling")
        self._answer: Future[PoolStatus] | None = None
        self._asked_s = float("-inf")
        self._answers = False

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and what Serve should remember for us: nothing."""
        wanted = context.target_num_replicas
        try:
            status = self._news()
            return (wanted if status is None else self._decide(status, wanted)), {}
        except Exception:
            log.exception("the autoscaling policy failed; the number of replicas stays")
            return wanted, {}

    def _news(self) -> PoolStatus | None:
        """The pool's answer when there is a new one; asks again when it is time."""
        now_s = self._clock()
        answer = self._answer
        if answer is None:
            if now_s - self._asked_s >= self._config.look_s:
                self._asked_s = now_s
                self._answer = self._thread.submit(self._ask)
            return None
        if not answer.done():
            return None
        self._answer = None
        error = answer.exception()
        if (error is None) != self._answers:
            self._answers = error is None
            if error is None:
                log.info("autoscaling: the pool answers")
            else:
                log.warning("autoscaling: the pool does not answer: %s", error)
        return answer.result() if error is None else None

    def _decide(self, status: PoolStatus, wanted: int) -> int:
        load = pool_load(status, self._meter.look(status))
        number, self._state = wanted_replicas(
            self._config, load, wanted, self._state, self._clock()
        )
        if number != wanted:
            log.info(
                "autoscaling: %d -> %d replicas; %d serve, %d tokens are outstanding, "
                "%.0f/s are committed, one replica commits %.0f/s",
                *(wanted, number, load.serving, load.outstanding_tokens),
                *(load.committed_per_s, load.tokens_per_s),
            )
        return number


class _Pools:
    """Asks the pool's actors and waits for their answers; finds them again when one is gone."""

    def __init__(self, names: Sequence[str], namespace: str) -> None:
        self._names = names
        self._namespace = namespace
        self._actors: list[Any] = []

    def __call__(self) -> PoolStatus:
        """All shards as one. Raises what Ray raises, ValueError when there is no such actor."""
        if not self._actors:
            self._actors = [ray.get_actor(name, namespace=self._namespace) for name in self._names]
        try:
            views = ray.get([actor.status.remote() for actor in self._actors], timeout=_ANSWER_S)
        except Exception:
            self._actors = []
            raise
        return merged_status([view.status for view in views])


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
                "namespace": config.pool.namespace,
                "autoscaling": ours.model_dump(),
                "rows_max": config.scheduler.rows_max,
            },
        ),
    )
