"""Several pools side by side, each a shard with its own replicas: which takes what.

A scheduler knows one shard and nothing of the others. A frontend chooses a request's shard by
`choose_shard`; a replica belongs to the shard that `shard_of_rank` says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

import msgspec

from scheduler.status import PoolStatus

_SUMS = [field.name for field in fields(PoolStatus) if field.name not in ("replicas", "finished")]
"""Fields of a status that are added up."""


class ShardLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a pool says of its load, and a frontend knows of a shard; it may be a little old."""

    serving: int = 0
    """Replicas that take sequences now."""
    outstanding_tokens: float = 0
    """Tokens that its requests are expected to commit, those on their way to it included."""
    answers: bool = True
    """Whether its pool has answered lately."""
    length_max: float = math.inf
    """Longest content (prompt + new tokens) that one of these replicas can hold."""
    expected_share: float = 1.0
    """The part of its limit that a request is expected to commit."""

    def holds(self, length: int) -> bool:
        """Whether it has a replica now that can hold a content of so many tokens."""
        return self.serving > 0 and length <= self.length_max


def choose_shard(loads: Sequence[ShardLoad], tokens: float, turn: int, length: int) -> int:
    """Index of the shard that a request for at most so many new tokens goes to.

    Where its last token is due first: the fewest outstanding tokens per replica, this request's
    included. A shard whose replicas are all too small for its `length` (prompt + new tokens) is
    chosen only if all replicas are, one without replicas only if no other has any, one that does
    not answer only if no other does. Among equals the first from `turn` on is taken, so that
    several frontends do not all begin with the same one. `loads` must not be empty.
    """

    def due(index: int) -> tuple[bool, bool, bool, float, int]:
        load = loads[index]
        each = (load.outstanding_tokens + load.expected_share * tokens) / max(load.serving, 1)
        wrong = not load.answers, load.serving == 0, not load.holds(length)
        return *wrong, each, (index - turn) % len(loads)

    return min(range(len(loads)), key=due)


def shard_of_rank(rank: int, shards: int) -> int:
    """The shard of the replica with this rank.

    Ranks are the numbers 0 to replicas - 1, each held by one replica: then the numbers of replicas
    per shard differ by at most one, whatever joins and goes.
    """
    return rank % shards


def merged_status(shards: Sequence[PoolStatus]) -> PoolStatus:
    """All shards as if they were one pool. `shards` must not be empty."""
    sums = {name: sum(getattr(shard, name) for shard in shards) for name in _SUMS}
    return PoolStatus(
        replicas=tuple(replica for shard in shards for replica in shard.replicas),
        finished=sum((Counter(shard.finished) for shard in shards), Counter()),
        **sums,
    )
