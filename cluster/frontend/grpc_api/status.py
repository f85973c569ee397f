"""What the pool says of itself, as the answer to a Status call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from cluster.pool.protocol import PoolView
from protos import lockstep_pb2 as pb
from scheduler.status import ReplicaStatus

_M = TypeVar("_M", bound=Message)


def to_status(view: PoolView) -> pb.StatusResponse:
    status = view.status
    figures = status.figures
    return _copied(
        pb.StatusResponse,
        (view, status, figures),
        ready=not view.stopping and status.serving > 0,
        pool_incarnation=view.incarnation,
        pool_uptime_s=view.uptime_s,
        replicas=[_replica(replica) for replica in status.replicas],
        running=status.live - status.waiting,
        requests_finished=sum(status.finished.values()),
        tokens_committed=figures.committed_tokens,
        batch_spread_mean=figures.spread_mean,
        shards=[
            *(_shard(shard) for shard in view.shards),
            *(pb.ShardStatus(name=name, silent=True) for name in view.silent),
        ],
        batches=figures.step_batches,
        batch_spread_sum=figures.spread_sum,
    )


def _shard(view: PoolView) -> pb.ShardStatus:
    status = view.status
    running = status.live - status.waiting
    return _copied(pb.ShardStatus, (view, status), running=running, silent=False)


def _replica(replica: ReplicaStatus) -> pb.ReplicaStatus:
    estimates = _copied(pb.CostEstimates, (replica.estimates,))
    free = replica.spec.kv_blocks - replica.kv_blocks_used
    sources = (replica, replica.spec, replica.figures)
    return _copied(pb.ReplicaStatus, sources, kv_blocks_free=free, cost_estimates=estimates)


def _copied(kind: type[_M], sources: Sequence[object], **others: Any) -> _M:
    """A message with `others`, and with what a source has by the name of a field."""
    for name in kind.DESCRIPTOR.fields_by_name.keys() - others.keys():
        source = next((one for one in sources if hasattr(one, name)), None)
        if source is not None:
            others[name] = getattr(source, name)
    return kind(**others)
