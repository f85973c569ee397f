"""Brings each of the scheduler's actions to the worker or frontend that it concerns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cluster.metrics import PoolMeter
from cluster.pool.peers import FrontendPeer, WorkerPeer
from scheduler.messages import (
    Action,
    Dispatch,
    Emit,
    Finish,
    Interrupt,
    RecordFailure,
    Reject,
    Release,
)


class Delivery:
    """Of one pool. What concerns a peer that is gone is dropped."""

    def __init__(
        self,
        workers: Mapping[str, WorkerPeer],
        owners: dict[str, FrontendPeer],
        meter: PoolMeter,
        gather_s: float,
    ) -> None:
        """`workers` by the replica's id; `owners` by the live request's, which loses those that
        end. `gather_s`: how long tokens wait for others of the same frontend."""
        self._workers = workers
        self._owners = owners
        self._meter = meter
        self._gather_s = gather_s
        self._due: dict[WorkerPeer | FrontendPeer, float] = {}
        """Within which time peers send what was left to them since the last flush."""

    def post(self, actions: Iterable[Action]) -> None:
        """Leave the actions of one event to their peers, which send nothing before `flush`."""
        for action in actions:
            self._post(action)

    def flush(self) -> None:
        due, self._due = self._due, {}
        for peer, within_s in due.items():
            if isinstance(peer, WorkerPeer):
                peer.flush()
            else:
                peer.flush_within(within_s)

    def _post(self, action: Action) -> None:
        match action:
            case Dispatch(batch):
                if (worker := self._workers.get(batch.replica_id)) is not None:
                    worker.batches[batch.id] = batch
                    worker.post(batch)
                    self._due[worker] = 0.0
            case Interrupt(replica_id) | Release(replica_id):
                if (worker := self._workers.get(replica_id)) is not None:
                    worker.post(action)
                    self._due[worker] = 0.0
            case Emit(request_id, start, tokens):
                self._meter.committed(len(tokens))
                if (owner := self._owners.get(request_id)) is not None:
                    owner.post(action)
                    # Only the first token of a request is waited for by itself.
                    within_s = self._gather_s if start else 0.0
                    self._due[owner] = min(within_s, self._due.get(owner, within_s))
            case RecordFailure(request_id):
                if (owner := self._owners.get(request_id)) is not None:
                    owner.post(action)
                    self._due[owner] = 0.0
            case Finish(request_id) | Reject(request_id):
                if isinstance(action, Finish):
                    self._meter.finished(action)
                else:
                    self._meter.rejected(action)
                if (owner := self._owners.pop(request_id, None)) is not None:
                    owner.requests.discard(request_id)
                    owner.post(action)
                    self._due[owner] = 0.0
