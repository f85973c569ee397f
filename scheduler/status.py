"""What the pool looks like at one moment, for status calls, metrics and autoscaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.draft_length import CostEstimates, DraftPolicy
from scheduler.messages import FinishReason, ReplicaSpec, StepTimes
from scheduler.state import Pool, Replica


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica; counts are sums since it joined."""

    id: str
    spec: ReplicaSpec
    draining: bool
    residents: int
    """Sequences with reserved blocks: prefilling (or between two chunks), ready, stepping and
    leaving."""
    batches_in_flight: int
    kv_blocks_used: int
    """Reserved blocks: what sequences own, and what is set aside for their next tokens."""
    kv_blocks_total: int
    batches: int
    busy_s: float
    """Time in which it ran batches; committed_tokens over this is what it commits under load."""
    steps: int
    row_steps: int
    """Steps times rows; committed_tokens over this is the tokens per row and step."""
    draft_tokens: int
    accepted_tokens: int
    committed_tokens: int
    spread_mean: float
    """Tokens between the longest and the shortest row of a batch, over its speculate batches."""
    kv_positions_own: int
    kv_positions_read: int
    last_times: StepTimes
    groups: int = 0
    """Speculate batches answered, and the sum of their spreads in tokens."""
    spread_sum: int = 0
    prefill_tokens: int = 0
    """KV positions that prefill batches computed, and those that sequences found when they came."""
    reused_tokens: int = 0
    estimates: CostEstimates = field(default_factory=CostEstimates)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The pool; `finished` and `rejected` are sums since its start."""

    waiting: int
    live: int
    """Accepted and not finished: waiting or on a replica."""
    replicas: tuple[ReplicaStatus, ...]
    """By order of joining."""
    finished: Mapping[FinishReason, int]
    rejected: int
    waiting_tokens: int = 0
    """Tokens (prompt and limit) of the requests that wait."""
    outstanding_tokens: int = 0
    """Tokens that accepted requests may still commit."""
    tokens_per_s: float = 0.0
    """Committed tokens per second over the last seconds."""
    preempted: int = 0
    """How often a sequence was sent back because KV blocks ran out; a sum, as the next two."""
    moved: int = 0
    recovered: int = 0


def pool_status(pool: Pool, rejected: int, now_s: float, policy: DraftPolicy) -> PoolStatus:
    """Takes O(replicas)."""
    replicas = tuple(_replica_status(replica, policy) for replica in pool.replicas.values())
    return PoolStatus(
        waiting=len(pool.waiting),
        live=pool.live_count(),
        replicas=replicas,
        finished={reason: pool.finished[reason] for reason in FinishReason},
        rejected=rejected,
        waiting_tokens=pool.waiting.tokens,
        outstanding_tokens=pool.outstanding_tokens,
        tokens_per_s=pool.rate.per_s(now_s),
        preempted=pool.preempted,
        moved=pool.moved,
        recovered=pool.recovered,
    )


def _replica_status(replica: Replica, policy: DraftPolicy) -> ReplicaStatus:
    figures = replica.figures
    return ReplicaStatus(
        id=replica.id,
        spec=replica.spec,
        draining=replica.draining,
        residents=len(replica.residents),
        batches_in_flight=len(replica.pipeline),
        kv_blocks_used=replica.blocks_used,
        kv_blocks_total=replica.spec.kv_blocks,
        batches=figures.batches,
        busy_s=figures.busy_s,
        steps=figures.steps,
        row_steps=figures.row_steps,
        draft_tokens=figures.draft_tokens,
        accepted_tokens=figures.accepted_tokens,
        committed_tokens=figures.committed_tokens,
        spread_mean=figures.spread_sum / figures.groups if figures.groups else 0.0,
        kv_positions_own=figures.kv_positions_own,
        kv_positions_read=figures.kv_positions_read,
        last_times=figures.last_times,
        estimates=policy.estimates(replica.id),
        groups=figures.groups,
        spread_sum=figures.spread_sum,
        prefill_tokens=figures.prefill_tokens,
        reused_tokens=figures.reused_tokens,
    )
