"""Several pools side by side, each a shard with its own replicas: who goes where.

A scheduler knows one shard and nothing of the others. Whoever brings requests chooses the shard by
`choose_shard`; a replica belongs to the shard that `shard_of_rank` says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from scheduler.messages import FinishReason
from scheduler.status import PoolStatus


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """What is known of a shard by whoever chooses; it may be a little old."""

    serving: int
    """Replicas that take sequences now."""
    outstanding_tokens: float
    """Tokens that its requests may still commit, those on their way to it included."""
    answers: bool = True
    """Whether its pool has answered lately."""


def choose_shard(loads: Sequence[ShardLoad], tokens: float = 0.0, turn: int = 0) -> int:
    """Index of the shard that a request of so many new tokens goes to.

    Where its last token is due first: the fewest outstanding tokens per replica, this request's
    included. A shard without replicas is chosen only if no other has any, one that does not answer
    only if no other does. Among equals the first from `turn` on is taken, so that several who
    choose do not all begin with the same one. `loads` must not be empty.
    """

    def due(index: int) -> tuple[bool, bool, float, int]:
        load = loads[index]
        share = (load.outstanding_tokens + tokens) / max(load.serving, 1)
        return not load.answers, load.serving == 0, share, (index - turn) % len(loads)

    return min(range(len(loads)), key=due)


def next_shard(
    loads: Sequence[ShardLoad], full: Collection[int], tokens: float = 0.0, turn: int = 0
) -> int | None:
    """Index of the shard that is offered what the shards in `full` had no room for; None: no other.

    Chosen as by `choose_shard` among those that would serve it: one that does not answer, or has no
    replica while a full one has, would only keep it, and then hand it on past the bound of another.
    """
    serves = any(loads[shard].serving for shard in full)
    rest = [
        shard
        for shard, load in enumerate(loads)
        if shard not in full and load.answers and (load.serving or not serves)
    ]
    if not rest:
        return None
    return rest[choose_shard([loads[shard] for shard in rest], tokens, turn)]


def shard_of_rank(rank: int, shards: int) -> int:
    """The shard of the replica with this rank.

    Ranks are the numbers 0 to replicas - 1, each held by one replica: then the numbers of replicas
    per shard differ by at most one, whatever joins and goes.
    """
    return rank % shards


def merged_status(shards: Sequence[PoolStatus]) -> PoolStatus:
    """All shards as if they were one pool. `shards` must not be empty."""
    if len(shards) == 1:
        return shards[0]
    return PoolStatus(
        waiting=sum(shard.waiting for shard in shards),
        live=sum(shard.live for shard in shards),
        replicas=tuple(replica for shard in shards for replica in shard.replicas),
        finished={
            reason: sum(shard.finished.get(reason, 0) for shard in shards)
            for reason in FinishReason
        },
        rejected=sum(shard.rejected for shard in shards),
        waiting_tokens=sum(shard.waiting_tokens for shard in shards),
        outstanding_tokens=sum(shard.outstanding_tokens for shard in shards),
        tokens_per_s=sum(shard.tokens_per_s for shard in shards),
        preempted=sum(shard.preempted for shard in shards),
        moved=sum(shard.moved for shard in shards),
        recovered=sum(shard.recovered for shard in shards),
    )
