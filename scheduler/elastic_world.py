"""Drives a simulated world's replicas by the autoscaling policy, with a cold start for each.

A `Watch` of `simulator.World` and nothing more: it looks at the pool with the world's ticks, lets
replicas join some time after they are wanted and drains the newest when there are too many. What
Serve does in a cluster, it does under the virtual clock. Set `world` before the world runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.autoscaling import (
    AutoscalingConfig,
    CapacityMeter,
    ScalingState,
    pool_load,
    wanted_replicas,
)
from scheduler.messages import Action, Event, ReplicaSpec, Tick
from scheduler.simulator import World

_EPSILON_S = 1e-9


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen and decided at one moment; tokens and replicas."""

    now_s: float
    wanted: int
    serving: int
    waiting: int
    outstanding_tokens: int


class Autoscaler:
    """Starts and stops the replicas of one world. It names them e0, e1, ... as they are wanted."""

    def __init__(
        self,
        config: AutoscalingConfig,
        spec: ReplicaSpec,
        *,
        rows_max: int,
        start_s: float,
        leave_s: float = 0.5,
    ) -> None:
        """A replica serves `start_s` after it is wanted, and leaves `leave_s` after its drain."""
        self.world: World | None = None
        self.looks: list[Look] = []
        self._config = config
        self._spec = spec
        self._start_s = start_s
        self._leave_s = leave_s
        self._meter = CapacityMeter(config.tokens_per_s, rows_max)
        self._state = ScalingState()
        self._wanted = 0
        self._starting: list[tuple[float, str]] = []
        """(when it joins, name), by time."""
        self._serving: list[str] = []
        """Oldest first."""
        self._named = 0
        self._looked_s = float("-inf")

    def __call__(self, now_s: float, event: Event, actions: list[Action]) -> None:
        if not isinstance(event, Tick):
            return
        self._join_who_is_due(now_s)
        if now_s - self._looked_s + _EPSILON_S >= self._config.look_s:
            self._looked_s = now_s
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        assert self.world is not None
        status = self.world.scheduler.snapshot()
        load = pool_load(status, self._meter.look(status))
        self._wanted, self._state = wanted_replicas(
            self._config, load, self._wanted, self._state, now_s
        )
        self.looks.append(
            Look(now_s, self._wanted, load.serving, load.waiting, status.outstanding_tokens)
        )
        while len(self._serving) + len(self._starting) < self._wanted:
            self._starting.append((now_s + self._start_s, f"e{self._named}"))
            self._named += 1
        while len(self._serving) + len(self._starting) > self._wanted:
            # As in Serve: who does not serve yet goes first.
            if self._starting:
                self._starting.pop()
            else:
                self.world.drain(now_s, self._serving.pop(), self._leave_s, rejoin=False)

    def _join_who_is_due(self, now_s: float) -> None:
        assert self.world is not None
        while self._starting and self._starting[0][0] <= now_s + _EPSILON_S:
            _, name = self._starting.pop(0)
            self._serving.append(name)
            self.world.join(now_s, name, self._spec)
