"""A hand on the scheduler's door: it turns events into steps and checks the books after each."""

from __future__ import annotations

from typing import TypeVar

from scheduler.config import SchedulerConfig
from scheduler.messages import (
    Action,
    Batch,
    BatchKind,
    Cancel,
    Dispatch,
    Emit,
    Event,
    FailureRecord,
    Finish,
    RecordFailure,
    Release,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    ReplicaSpec,
    Request,
    RowResult,
    StepDone,
    StepFailed,
    StepResult,
    Submit,
    Tick,
)
from scheduler.scheduler import Scheduler
from scheduler.state import ReplicaRecord
from scheduler.state.sequence import Sequence

T = TypeVar("T")


class Hand:
    """Drives one scheduler; every method returns the actions of its event."""

    def __init__(self, **config: object) -> None:
        # Most tests are about other things than blocks that run out or what is chosen by cost.
        settings = {"kv_reserve": 1.0, "draft_len": 4, "steps_per_batch_max": 4, **config}
        self.scheduler = Scheduler(SchedulerConfig(**settings))
        self.now_s = 0.0
        self.batches: dict[int, Batch] = {}
        self._unanswered: dict[int, Batch] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, Finish] = {}
        self.records: dict[str, FailureRecord] = {}
        """The last word on each request, as its frontend keeps it."""

    def tell(self, event: Event) -> list[Action]:
        pool = self.scheduler.pool
        moved = pool.moved
        actions = self.scheduler.step(event, self.now_s)
        self.scheduler.check_integrity()
        # A third replica may be lighter than the one that has taken some of them.
        if pool.moved > moved and len(pool.replicas) == 2:
            assert all(row.preempted for row in pool.waiting.values()), "moved, but not taken"
        if isinstance(event, StepDone):
            self._unanswered.pop(event.result.batch_id, None)
        elif isinstance(event, StepFailed):
            self._unanswered.pop(event.batch_id, None)
        elif isinstance(event, ReplicaLost):
            for batch in self.in_flight(event.replica_id):
                del self._unanswered[batch.id]
        for action in actions:
            if isinstance(action, Dispatch):
                # From 1 on: a worker ends all batches up to the one that is interrupted last.
                assert action.batch.id > next(reversed(self.batches), 0), "a batch's id"
                self.batches[action.batch.id] = self._unanswered[action.batch.id] = action.batch
            elif isinstance(action, Emit):
                assert action.tokens or action.extras, "an empty Emit"
                tokens = self.tokens.setdefault(action.request_id, [])
                tokens.extend(action.tokens)
            elif isinstance(action, RecordFailure):
                assert action.request_id not in self.finishes, "a record after its end"
                self.records[action.request_id] = action.record
            elif isinstance(action, Finish):
                assert action.request_id not in self.finishes, "finished twice"
                self.finishes[action.request_id] = action
        return actions

    def join(self, replica_id: str = "r", **spec: int) -> list[Action]:
        fields = {"kv_blocks": 1000, "block_size": 4, "context_len": 512, "vocab_size": 1000}
        return self.tell(ReplicaJoined(replica_id, ReplicaSpec(**{**fields, **spec})))

    def submit(
        self,
        request_id: str,
        length: int = 3,
        max_new_tokens: int = 100,
        prompt: tuple[int, ...] | None = None,
        **fields: object,
    ) -> list[Action]:
        tokens = prompt if prompt is not None else (1,) * length
        return self.tell(Submit(Request(request_id, tokens, max_new_tokens, **fields)))

    def cancel(self, request_id: str) -> list[Action]:
        return self.tell(Cancel(request_id))

    def drain(self, replica_id: str = "r") -> list[Action]:
        return self.tell(ReplicaDraining(replica_id))

    def lose(self, replica_id: str = "r", by_batch: bool = True) -> list[Action]:
        return self.tell(ReplicaLost(replica_id, by_batch))

    def tick(self, now_s: float) -> list[Action]:
        self.now_s = now_s
        return self.tell(Tick())

    def done(self, batch: Batch, **tokens: tuple[int, ...]) -> list[Action]:
        """The batch's result: one token (1) per row where none are given."""
        rows = tuple(RowResult(row.sequence_id) for row in batch.prefill)
        if batch.kind is BatchKind.SPECULATE:
            rows = tuple(
                RowResult(row.sequence_id, tokens.get(row.sequence_id, (1,)), 1, row.draft_len)
                for row in batch.rows
            )
        return self.tell(StepDone(StepResult(batch.id, batch.replica_id, rows, steps=1)))

    def fail(self, batch: Batch, message: str = "out of memory") -> list[Action]:
        return self.tell(StepFailed(batch.replica_id, batch.id, message))

    def in_flight(self, replica_id: str = "r") -> list[Batch]:
        return [batch for batch in self._unanswered.values() if batch.replica_id == replica_id]

    def work(self, batches: int = 1, *replica_ids: str) -> list[Action]:
        """Answers the oldest batch in flight on each of these replicas, so many times; the last
        one's actions."""
        actions: list[Action] = []
        for _ in range(batches):
            for replica_id in replica_ids or ("r",):
                for batch in self.in_flight(replica_id)[:1]:
                    actions = self.done(batch)
        return actions

    def settle(self, replica_id: str = "r") -> list[Batch]:
        """Answers prefill batches until none is in flight; returns what is then."""
        while True:
            prefills = [o for o in self.in_flight(replica_id) if o.kind is BatchKind.PREFILL]
            if not prefills:
                return self.in_flight(replica_id)
            self.done(prefills[0])

    def replicas(self) -> list[str]:
        return list(self.scheduler.pool.replicas)

    def replica(self, replica_id: str = "r") -> ReplicaRecord:
        return self.scheduler.pool.replicas[replica_id]

    def sequences(self) -> list[Sequence]:
        return list(self.scheduler.pool.sequences.values())

    def waiting(self) -> list[str]:
        return list(self.scheduler.pool.waiting)

    def used(self, replica_id: str = "r") -> int:
        return self.replica(replica_id).blocks_used


def batches_of(actions: list[Action]) -> list[Batch]:
    return [action.batch for action in actions if isinstance(action, Dispatch)]


def rows_of(batch: Batch) -> list[str]:
    return [row.sequence_id for row in batch.prefill or batch.rows]


def of_kind(actions: list[Action], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def released(actions: list[Action]) -> list[str]:
    return [
        sequence_id for release in of_kind(actions, Release) for sequence_id in release.sequence_ids
    ]


def only(actions: list[Action], kind: type[T]) -> T:
    """The one action of this kind."""
    (one,) = of_kind(actions, kind)
    return one
