"""How many replicas a load wants: a pure function of figures, settings and its own last state.

Knows nothing of Ray or Serve and reads no clock. `CapacityMeter` says what one replica commits per
second of work; `wanted_replicas` divides the outstanding tokens by it and by the wanted drain time.
Outstanding tokens alone would flap: enough replicas keep the queue short, a short queue asks for
few replicas, too few let it grow. So tokens outstanding call replicas, and tokens committed per
second hold the ones that are needed to commit them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, Field, model_validator

from scheduler.state import BatchFigures
from scheduler.status import PoolStatus

LOOK_S = 0.5
"""How often the pool is looked at."""
STARTING_MAX = 4
"""Replicas that may be on their way at once, or as many as serve: what one commits is a guess until
one has served, and then four at a time would be slow for hundreds."""
DOWN_SHARE = 0.7
"""A replica is removed only if the others would be used up to this share."""
LEAVING_SHARE = 0.25
"""Of the replicas may go at once: one by one hundreds would stay for hours."""
_SAMPLE_S = 1.0
"""Least time of work that says something about a replica's speed."""
_MEMORY_S = 20.0
"""Seconds of work after which a measured speed is two thirds forgotten."""


class AutoscalingConfig(BaseModel):
    """When replicas are started and stopped. A replica counts from when it serves."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min_replicas: int = Field(
        default=1, ge=0, description="Minimum of replicas; 0: none while there is no request."
    )
    max_replicas: int = Field(default=4, ge=1, description="Maximum of replicas.")
    drain_s: float = Field(
        default=10.0,
        gt=0,
        description="Target time to serve all outstanding tokens of admitted requests.",
    )
    up_delay_s: float = Field(
        default=2.0,
        ge=0,
        description="How long a load must last before replicas are added; from zero to one there"
        " is no delay.",
    )
    down_delay_s: float = Field(
        default=60.0, ge=0, description="How long a low load must last before replicas are removed."
    )
    idle_s: float = Field(
        default=300.0, ge=0, description="Time without any request before the last replica ends."
    )
    tokens_per_s: float = Field(
        default=500.0,
        gt=0,
        description="Tokens per second that one replica is assumed to commit until this is"
        " measured.",
    )

    @model_validator(mode="after")
    def _min_is_not_above_max(self) -> AutoscalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas must not be above max_replicas")
        return self


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What the policy remembers; times are of the clock that it is called with."""

    high_since_s: float | None = None
    """Since when the load asks for more than is wanted."""
    low_since_s: float | None = None
    """Since when fewer would do."""
    live_s: float | None = None
    """When there was a request last."""


def wanted_replicas(
    config: AutoscalingConfig,
    status: PoolStatus,
    tokens_per_s: float,
    wanted: int,
    state: ScalingState,
    now_s: float,
) -> tuple[int, ScalingState]:
    """The number of replicas to have from now on, and the state for the next call.

    `tokens_per_s` is what one replica commits per second of work, above 0. `wanted` is the number
    returned last time; `now_s` is of a clock that does not run backwards.
    """
    live = status.waiting > 0 or status.outstanding_tokens > 0
    live_s = now_s if live or state.live_s is None else state.live_s
    state = replace(state, live_s=live_s)
    wanted = min(max(wanted, config.min_replicas), config.max_replicas)
    least = 1 if live else 0
    # The first replica starts at once; more of them take the delay.
    wanted = wanted or least

    queue = status.outstanding_tokens / config.drain_s / tokens_per_s
    work = status.tokens_per_s / tokens_per_s
    enough = max(_whole(queue, config), least)
    if enough > wanted:
        since_s = now_s if state.high_since_s is None else state.high_since_s
        # Without a low since: what was low before this must last its delay anew.
        state = replace(state, high_since_s=since_s, low_since_s=None)
        if now_s - since_s >= config.up_delay_s:
            starting = max(STARTING_MAX, status.serving)
            wanted = max(wanted, min(enough, status.serving + starting))
        return wanted, state
    state = replace(state, high_since_s=None)
    needed = max(_whole(max(queue, work) / DOWN_SHARE, config), 1, config.min_replicas)
    if needed < wanted:
        since_s = now_s if state.low_since_s is None else state.low_since_s
        if now_s - since_s < config.down_delay_s:
            return wanted, replace(state, low_since_s=since_s)
        # Some go, and the delay begins again.
        going = min(wanted - needed, max(1, int(wanted * LEAVING_SHARE)))
        return wanted - going, replace(state, low_since_s=now_s)
    state = replace(state, low_since_s=None)
    if wanted == 1 and config.min_replicas == 0 and not live and now_s - live_s >= config.idle_s:
        wanted = 0
    return wanted, state


def unseen(state: ScalingState, now_s: float) -> ScalingState:
    """The state after a look at which the pool, or a shard of it, did not answer.

    Neither a low load nor an idle pool has lasted while it was not seen.
    """
    return replace(state, low_since_s=None, live_s=now_s)


def _whole(replicas: float, config: AutoscalingConfig) -> int:
    return math.ceil(min(replicas, config.max_replicas))


# ------------------------------------------------------------------------- what a replica can do


class CapacityMeter:
    """What one replica commits per second of work while it has enough of it.

    Idle time does not count, because only the time in batches does. Batches that are not full
    commit less than the replica could: such a sample may raise the figure and never lowers it.
    """

    def __init__(self, tokens_per_s: float, rows_max: int) -> None:
        """`tokens_per_s` stands until something was measured; `rows_max` is a full batch."""
        self.tokens_per_s = tokens_per_s
        self._rows_full = rows_max / 2
        self._measured = False
        self._since: dict[str, tuple[BatchFigures, bool]] = {}
        """By replica: its sums when its present sample began, and whether requests waited in its
        pool at every look since."""

    def look(self, *shards: PoolStatus) -> float:
        """Tokens per second of one replica; call it with every new status of the pool.

        Of several pools it takes the status of each: a request that waits in one gives the
        replicas of the others nothing to do.
        """
        since, self._since = self._since, {}
        for shard in shards:
            for replica in shard.replicas:
                figures = replica.figures
                before, waited = since.get(replica.id, (figures, True))
                waited = waited and shard.waiting > 0
                busy_s = figures.busy_s - before.busy_s
                if busy_s >= _SAMPLE_S:
                    self._sample(before, figures, waited)
                if not 0.0 <= busy_s < _SAMPLE_S:
                    before, waited = figures, True
                self._since[replica.id] = before, waited
        return self.tokens_per_s

    def _sample(self, before: BatchFigures, now: BatchFigures, waited: bool) -> None:
        busy_s = now.busy_s - before.busy_s
        speed = (now.committed_tokens - before.committed_tokens) / busy_s
        if speed <= 0.0:
            return
        row_steps, steps = now.row_steps - before.row_steps, now.steps - before.steps
        if not (waited or row_steps >= self._rows_full * steps):
            self.tokens_per_s = max(self.tokens_per_s, speed)
        elif self._measured:
            share = 1.0 - math.exp(-busy_s / _MEMORY_S)
            self.tokens_per_s += share * (speed - self.tokens_per_s)
        else:
            self.tokens_per_s = speed
            self._measured = True
