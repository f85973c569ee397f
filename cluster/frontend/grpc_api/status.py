"""What the pool says of itself, as the answer to a Status call."""

from __future__ import annotations

import math

from cluster.pool.protocol import PoolView
from protos import lockstep_pb2 as pb
from scheduler.draft_length import CostEstimates, Latency
from scheduler.status import ReplicaStatus


def to_status(view: PoolView) -> pb.StatusResponse:
    status = view.status
    figures = status.figures
    return pb.StatusResponse(
        ready=not view.stopping and status.serving > 0,
        stopping=view.stopping,
        pool_incarnation=view.incarnation,
        pool_uptime_s=view.uptime_s,
        replicas=[_replica(replica) for replica in status.replicas],
        waiting=status.waiting,
        running=status.live - status.waiting,
        requests_finished=sum(status.finished.values()),
        tokens_committed=figures.committed_tokens,
        steps=figures.steps,
        row_steps=figures.row_steps,
        draft_tokens=figures.draft_tokens,
        accepted_tokens=figures.accepted_tokens,
        acceptance=figures.acceptance,
        batch_spread_mean=figures.spread_mean,
        waiting_tokens=status.waiting_tokens,
        outstanding_tokens=status.outstanding_tokens,
        tokens_per_s=status.tokens_per_s,
        preempted=status.preempted,
        moved=status.moved,
        recovered=status.recovered,
        shards=[
            *(_shard(shard) for shard in view.shards),
            *(pb.ShardStatus(name=name, silent=True) for name in view.silent),
        ],
        batches=figures.step_batches,
        batch_spread_sum=figures.spread_sum,
        kv_positions_own=figures.kv_positions_own,
        kv_positions_read=figures.kv_positions_read,
        prefill_tokens=figures.prefill_tokens,
        reused_tokens=figures.reused_tokens,
    )


def _shard(view: PoolView) -> pb.ShardStatus:
    status = view.status
    return pb.ShardStatus(
        name=view.name,
        incarnation=view.incarnation,
        uptime_s=view.uptime_s,
        serving=status.serving,
        waiting=status.waiting,
        running=status.live - status.waiting,
        outstanding_tokens=status.outstanding_tokens,
        tokens_per_s=status.tokens_per_s,
    )


def _replica(replica: ReplicaStatus) -> pb.ReplicaStatus:
    spec = replica.spec
    return pb.ReplicaStatus(
        id=replica.id,
        draining=replica.draining,
        residents=replica.residents,
        batches_in_flight=replica.batches_in_flight,
        kv_blocks=spec.kv_blocks,
        kv_blocks_free=spec.kv_blocks - replica.kv_blocks_used,
        block_size=spec.block_size,
        context_len=spec.context_len,
        target=spec.target,
        draft=spec.draft,
        device=spec.device,
        dtype=spec.dtype,
        vocab_size=spec.vocab_size,
        attention=spec.attention,
        arithmetic=spec.arithmetic,
        drafter=spec.drafter,
        cost_estimates=_estimates(replica.estimates),
    )


def _estimates(found: CostEstimates) -> pb.CostEstimates:
    return pb.CostEstimates(
        draft_len=found.draft_len,
        steps=found.steps,
        step_s=found.step_s,
        round_trip_s=found.round_trip_s,
        acceptance_greedy=found.acceptance_greedy,
        acceptance_sampled=found.acceptance_sampled,
        apart_positions=found.apart_positions if math.isfinite(found.apart_positions) else None,
        slowdown=found.slowdown,
        draft=_latencies(found.draft),
        step=_latencies(found.step),
        prefill=_latencies(found.prefill),
    )


def _latencies(rows: tuple[Latency, ...]) -> list[pb.Latency]:
    return [pb.Latency(tokens=one.tokens, seconds=one.seconds) for one in rows]
