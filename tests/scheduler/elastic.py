"""A simulated world whose replicas follow the autoscaling policy, with a cold start for each."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from scheduler.config import SchedulerConfig
from scheduler.messages import Action, Event, ReplicaSpec, Tick
from scheduler.scaling import (
    AutoscalingConfig,
    CapacityMeter,
    ScalingState,
    pool_load,
    wanted_replicas,
)
from scheduler.simulation import Times, World

_EPSILON_S = 1e-9
_LEAVE_S = 0.5
"""From a replica's drain to its end."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen and decided at one moment."""

    now_s: float
    wanted: int
    serving: int


class ElasticWorld(World):
    """Starts and stops its replicas e0, e1, ... as Serve does in a cluster."""

    def __init__(
        self,
        rng: Random,
        config: AutoscalingConfig,
        scheduler: SchedulerConfig,
        spec: ReplicaSpec,
        times: Times,
        start_s: float,
    ) -> None:
        """A replica serves `start_s` after it is wanted."""
        super().__init__(rng, times, scheduler, watch=self._look)
        self.looks: list[Look] = []
        self._config = config
        self._spec = spec
        self._start_s = start_s
        self._meter = CapacityMeter(config.tokens_per_s, scheduler.rows_max)
        self._state = ScalingState()
        self._wanted = 0
        self._starting: list[tuple[float, str]] = []
        """(when it joins, name), by time."""
        self._serving: list[str] = []
        """Oldest first."""
        self._named = 0
        self._looked_s = float("-inf")

    def _look(self, now_s: float, event: Event, actions: list[Action]) -> None:
        if not isinstance(event, Tick):
            return
        while self._starting and self._starting[0][0] <= now_s + _EPSILON_S:
            self._serving.append(self._starting.pop(0)[1])
            self.join(now_s, self._serving[-1], self._spec)
        if now_s - self._looked_s + _EPSILON_S < self._config.look_s:
            return
        self._looked_s = now_s
        status = self.scheduler.snapshot()
        load = pool_load(status, self._meter.look(status))
        self._wanted, self._state = wanted_replicas(
            self._config, load, self._wanted, self._state, now_s
        )
        self.looks.append(Look(now_s, self._wanted, load.serving))
        while len(self._serving) + len(self._starting) < self._wanted:
            self._starting.append((now_s + self._start_s, f"e{self._named}"))
            self._named += 1
        while len(self._serving) + len(self._starting) > self._wanted:
            # As in Serve: a replica that does not serve yet goes first.
            if self._starting:
                self._starting.pop()
            else:
                self.drain(now_s, self._serving.pop(), _LEAVE_S, rejoin=False)
