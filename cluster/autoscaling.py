"""Serve's side of autoscaling: asks the pool for its load and lets the pure policy decide.

Serve's controller makes one `PoolPolicy` for the replica deployment and calls it in its control
loop, ten times a second. Replicas cannot report while there are none, and Serve hears of a custom
figure only every ten seconds; so the policy asks the pool's actor, which lives as long as a
frontend does. It waits for no search and no answer: between two answers the number stays.

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
from cluster.pool.protocol import NAMESPACE, PoolView
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
"""How long the shards may take to answer a look."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`autoscaling` holds the fields of AutoscalingConfig."""
        self.config = AutoscalingConfig.model_validate(dict(autoscaling))
        self._names = pool_names
        self._clock = clock
        self._meter = CapacityMeter(self.config.tokens_per_s, rows_max)
        self._state = ScalingState()
        self._actors: Future[list[Any]] | None = None
        """The pools; found again after each failure."""
        self._search = ThreadPoolExecutor(1)
        """For that: Ray's control plane may take a minute to answer."""
        self._asked: list[Future[PoolView]] = []
        """Their answers that are waited for; none where no look is under way."""
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
        """What all shards have said, when it is new; asks again when it is time."""
        try:
            answer = self._look()
        except Exception as error:
            self._actors, self._asked = None, []
            self._state = unseen(self._state, self._clock())
            if self._answers:
                log.warning("autoscaling: the pool does not answer: %s", error)
            self._answers = False
            return None
        if answer is not None and not self._answers:
            log.info("autoscaling: the pool answers")
            self._answers = True
        return answer

    def _look(self) -> Sequence[PoolStatus] | None:
        """Raises what Ray raises where a shard does not answer."""
        now_s = self._clock()
        if self._asked:
            if not all(answer.done() for answer in self._asked):
                if now_s - self._asked_s < _ANSWER_S:
                    return None
                raise TimeoutError(f"no answer within {_ANSWER_S:g} s")
            asked, self._asked = self._asked, []
            return [answer.result(timeout=0).status for answer in asked]
        if now_s - self._asked_s >= LOOK_S:
            self._actors = self._actors or self._search.submit(self._find)
            if self._actors.done():
                self._asked_s = now_s
                self._asked = [actor.status.remote().future() for actor in self._actors.result()]
            else:
                self._state = unseen(self._state, now_s)
        return None

    def _find(self) -> list[Any]:
        return [ray.get_actor(name, namespace=NAMESPACE) for name in self._names]

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
