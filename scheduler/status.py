"""What the pool looks like at one moment, for status calls, metrics and autoscaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scheduler.draft_length import CostEstimates, DraftPolicy
from scheduler.messages import FinishReason, ReplicaSpec
from scheduler.state import BatchFigures, Pool


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica."""

    id: str
    spec: ReplicaSpec
    draining: bool = False
    residents: int = 0
    """Sequences with reserved blocks: those being filled, ready, stepping and leaving."""
    batches_in_flight: int = 0
    kv_blocks_used: int = 0
    """Reserved blocks: what sequences own, and what is set aside for their next tokens."""
    figures: BatchFigures = field(default_factory=BatchFigures)
    """Sums since it joined."""
    estimates: CostEstimates = field(default_factory=CostEstimates)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The pool; `finished` are sums since its start."""

    waiting: int
    live: int
    """Admitted and not finished: waiting or on a replica."""
    replicas: tuple[ReplicaStatus, ...]
    """By order of joining."""
    finished: Mapping[FinishReason, int]
    waiting_tokens: int = 0
    """Tokens (prompt and limit) of the requests that wait."""
    outstanding_tokens: int = 0
    """Tokens that admitted requests are still expected to commit."""
    tokens_per_s: float = 0.0
    """Committed tokens per second over the last seconds."""
    preempted: int = 0
    """How often a sequence was sent back because KV blocks ran out; a sum, as the next two."""
    moved: int = 0
    recovered: int = 0

    @property
    def serving(self) -> int:
        """Replicas that take sequences now."""
        return sum(not replica.draining for replica in self.replicas)

    @property
    def figures(self) -> BatchFigures:
        """Of the replicas that are known now, together."""
        return sum((replica.figures for replica in self.replicas), BatchFigures())


def pool_status(pool: Pool, now_s: float, policy: DraftPolicy) -> PoolStatus:
    """Takes O(replicas and rows in flight)."""
    replicas = tuple(
        ReplicaStatus(
            id=replica.id,
            spec=replica.spec,
            draining=replica.draining,
            residents=len(replica.residents),
            batches_in_flight=len(replica.pipeline),
            kv_blocks_used=replica.blocks_used,
            figures=replace(replica.figures),
            estimates=policy.estimates(replica.id),
        )
        for replica in pool.replicas.values()
    )
    return PoolStatus(
        waiting=len(pool.waiting),
        live=pool.live_count(),
        replicas=replicas,
        finished={reason: pool.finished[reason] for reason in FinishReason},
        waiting_tokens=pool.waiting.tokens,
        outstanding_tokens=pool.outstanding_tokens,
        tokens_per_s=pool.rate.per_s(now_s),
        preempted=pool.preempted,
        moved=pool.moved,
        recovered=pool.recovered,
    )
