"""The scheduler: events in, actions out, and nothing else.

`Scheduler.step` is the only door. It reads no clock (time is an argument), draws nothing at random
and never raises on a valid event, so the same events give the same actions everywhere: in the pool
actor, in the engine of one process and in the simulator. Events that come late, twice or for
something unknown are recognised and dropped.

A replica that obeys the actions of its own in their order never needs more blocks than it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

from scheduler.admission import check_servable, refusal
from scheduler.batching import Dispatcher, lightest, rows_to_move
from scheduler.config import SchedulerConfig
from scheduler.draft_length import DraftPolicy
from scheduler.errors import InvalidRequest
from scheduler.faults import batch_failed, is_guilty, replica_died
from scheduler.messages import (
    Action,
    BatchKind,
    Cancel,
    Emit,
    Event,
    Finish,
    FinishReason,
    RecordFailure,
    Release,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    StepDone,
    StepFailed,
    Submit,
    Tick,
)
from scheduler.state import (
    Answer,
    InFlight,
    Move,
    Pool,
    ReplicaRecord,
    Sequence,
    answers_of,
    check_pool,
    finished_before_start,
)
from scheduler.status import PoolStatus, pool_status


class Scheduler:
    """One pool of sequences over all replicas; they must all serve the same target."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        self.pool = Pool(self.config)
        """The books, to be read; events alone change them."""
        self._policy = DraftPolicy(self.config)
        self._dispatcher = Dispatcher(self.config, self.pool, self._policy)
        self._now_s = 0.0
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            ReplicaJoined: self._replica_joined,
            ReplicaDraining: self._replica_draining,
            ReplicaLost: self._replica_lost,
            StepDone: self._step_done,
            StepFailed: self._step_failed,
            Tick: lambda event, now_s: None,  # deadlines are enforced at every event
        }
        # What the event in hand has led to; empty between steps.
        self._out: list[Action] = []
        self._released: dict[str, list[str]] = {}

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Takes one event at the time `now_s` [seconds, never falling] and says what to do.

        Deadlines are enforced at every event, after the event itself.
        """
        self._now_s = now_s
        try:
            self._handlers[type(event)](event, now_s)
            for sequence in self.pool.overdue(now_s):
                self._finish(sequence, FinishReason.DEADLINE)
            for replica_id, sequence_ids in self._released.items():
                self._out.append(Release(replica_id, tuple(sequence_ids)))
            self._dispatcher.run(self._out, now_s)
            return self._out
        finally:
            # What an event that raised had led to is no part of the next one's actions.
            self._out, self._released = [], {}

    def check_integrity(self) -> None:
        """Asserts every invariant of the books; for tests, O(everything)."""
        check_pool(self.pool)

    def snapshot(self) -> PoolStatus:
        """The pool as it stands, O(replicas and rows in flight)."""
        return pool_status(self.pool, self._now_s, self._policy)

    # ----------------------------------------------------------------- events

    def _submit(self, event: Submit, now_s: float) -> None:
        request, pool = event.request, self.pool
        refused = refusal(event, pool, now_s)
        if refused is not None:
            self._out.append(refused)
            return
        sequence = pool.admit(request, now_s)
        # Tokens that came since it was written count.
        sequence.record = event.record.at(sequence.length)
        sequence.validated = bool(pool.specs) or event.validated
        # A client may be reading the stream of one that carries tokens.
        pool.waiting.add(sequence, first=event.admitted_before and bool(request.committed))
        reason = finished_before_start(request)
        if reason is not None:
            self._finish(sequence, reason)
            return
        self._dispatcher.offer(sequence)

    def _cancel(self, event: Cancel, now_s: float) -> None:
        sequence = self.pool.sequences.get(event.request_id)
        if sequence is not None and sequence.live:
            self._finish(sequence, FinishReason.CANCELLED)

    def _replica_joined(self, event: ReplicaJoined, now_s: float) -> None:
        if event.replica_id in self.pool.replicas:
            return
        unchecked = not self.pool.specs
        # A status carries specs: none needs the trials again.
        self.pool.join(event.replica_id, replace(event.spec, trials=()))
        self._policy.joined(event.replica_id, event.spec)
        if unchecked:
            for sequence in list(self.pool.waiting.values()):
                # Others came while no replica was known that could have refused them.
                if sequence.validated:
                    continue
                sequence.validated = True
                try:
                    check_servable(sequence.request, self.pool)
                except InvalidRequest as error:
                    self._finish(sequence, FinishReason.FAILED, str(error))
        self._dispatcher.touch(event.replica_id)

    def _replica_draining(self, event: ReplicaDraining, now_s: float) -> None:
        replica = self.pool.replicas.get(event.replica_id)
        if replica is None or replica.draining:
            return
        self.pool.drain(replica)
        self._dispatcher.interrupt(replica, self._out)
        self._hand_back(replica)

    def _replica_lost(self, event: ReplicaLost, now_s: float) -> None:
        replica = self.pool.replicas.get(event.replica_id)
        if replica is None:
            return
        flights = list(replica.pipeline.batches.values())
        rows = [row for flight in flights for row in flight.rows if row.live]
        if event.by_batch:
            replica_died(rows, flights)
        self.pool.lose(replica)
        if event.by_batch:
            in_flight = sum(len(flight.rows) for flight in flights)
            for sequence in rows:
                if is_guilty(sequence, in_flight, self.config.failures_max):
                    deaths = sequence.record.deaths
                    message = f"the replicas that ran it died, {deaths} in all"
                    self._finish(sequence, FinishReason.FAILED, message)
            self._tell_records(rows)
        self._policy.lost(replica.id)
        self._dispatcher.offer_to_all()

    def _step_done(self, event: StepDone, now_s: float) -> None:
        result = event.result
        found = self._end_batch(result.replica_id, result.batch_id)
        if found is None:
            return
        replica, flight = found
        batch, sent_s = flight.batch, flight.sent_s
        answers = answers_of(self._rows_back(replica, flight), result)
        round_trip_s = None if sent_s is None else now_s - sent_s - result.times.total_s
        self._policy.observe(batch, result, answers, round_trip_s)
        if batch.kind is BatchKind.SPECULATE:
            committed = self._commit(answers)
            replica.figures.committed_tokens += committed
            self.pool.rate.add(committed, now_s)
        else:
            begins = {row.sequence_id: row.begin for row in batch.prefill}
            for sequence, row in answers:
                self.pool.end_prefill(replica, sequence, row.reused)
                if row.extras:
                    self._out.append(Emit(sequence.id, begins[sequence.id], (), row.extras))
                if row.failure is not None:
                    self._finish(sequence, FinishReason.FAILED, *astuple(row.failure))
        replica.figures.note(batch, result)
        replica.raise_rows_cap(batch)
        if replica.draining:
            self._hand_back(replica)
        else:
            self._balance(replica)

    def _step_failed(self, event: StepFailed, now_s: float) -> None:
        found = self._end_batch(event.replica_id, event.batch_id)
        if found is None:
            return
        replica, flight = found
        batch, size = flight.batch, len(flight.rows)
        rows = self._rows_back(replica, flight)
        # Before they move: a row in quarantine is ready apart from the others.
        batch_failed(rows, size, replica.id)
        if batch.kind is BatchKind.SPECULATE and size > 1:
            replica.lower_rows_cap(size // 2)
        guilty = [row for row in rows if is_guilty(row, size, self.config.failures_max)]
        back = [row for row in rows if row not in guilty]
        if batch.kind is BatchKind.SPECULATE:
            for sequence in rows:
                self.pool.move(sequence, Move.STEPPED)
            # They are residents still; only one that failed alone goes elsewhere.
            back = back if size == 1 else []
        else:
            for sequence in guilty:
                self.pool.move(sequence, Move.PREFILLED)
        for sequence in guilty:
            self._finish(sequence, FinishReason.FAILED, event.message)
        self._tell_records(rows)
        self._send_back(replica, back)
        if replica.draining:
            self._hand_back(replica)

    # ----------------------------------------------------------------- parts of events

    def _tell_records(self, rows: list[Sequence]) -> None:
        self._out.extend(RecordFailure(row.id, row.record) for row in rows if row.live)

    def _end_batch(self, replica_id: str, batch_id: int) -> tuple[ReplicaRecord, InFlight] | None:
        """Takes a batch out of flight; None for one that is unknown or was answered before."""
        replica = self.pool.replicas.get(replica_id)
        if replica is None:
            return None
        flight = replica.pipeline.batches.pop(batch_id, None)
        if flight is None:
            return None
        self._dispatcher.touch(replica_id)
        return replica, flight

    def _rows_back(self, replica: ReplicaRecord, flight: InFlight) -> list[Sequence]:
        """The live rows of a batch that has ended; leaving ones are let go."""
        live = []
        for sequence in flight.rows:
            if sequence.live:
                live.append(sequence)
            else:
                self._release(replica.id, sequence.id)
                self.pool.let_go(sequence)
        return live

    def _commit(self, answers: list[Answer]) -> int:
        """Books the tokens of a batch's live rows; returns how many count."""
        out = self._out
        committed = 0
        for sequence, row in answers:
            tokens, reason = self.pool.commit(sequence, row)
            if tokens:
                committed += len(tokens)
                start = len(sequence.committed) - len(tokens)
                out.append(
                    Emit(sequence.id, start, tokens, row.extras[: len(tokens)], row.accepted)
                )
            if reason is not None:
                self._finish(sequence, reason)
            elif row.failure is not None:
                self._finish(sequence, FinishReason.FAILED, *astuple(row.failure))
        return committed

    def _finish(self, sequence: Sequence, reason: FinishReason, *said: str) -> None:
        """`said`: the message, and the field at fault if one is."""
        self._out.append(Finish(sequence.id, reason, sequence.usage(), *said))
        replica_id = sequence.replica_id
        if sequence.reservation is not None:
            self._dispatcher.touch(sequence.reservation)
        if replica_id is not None:
            # No batch of several steps is in flight beside a ready row.
            self._dispatcher.interrupt(self.pool.replicas[replica_id], self._out)
        if self.pool.finish(sequence, reason) and replica_id is not None:
            self._release(replica_id, sequence.id)

    def _release(self, replica_id: str, sequence_id: str) -> None:
        self._released.setdefault(replica_id, []).append(sequence_id)
        self._dispatcher.touch(replica_id)

    def _send_back(self, replica: ReplicaRecord, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._release(replica.id, sequence.id)
        self.pool.send_back(sequences)
        self._dispatcher.offer_to_all()

    def _hand_back(self, replica: ReplicaRecord) -> None:
        """A draining replica's rows wait again, but for those that batches hold. The others are
        offered them, and a sequence that had reserved it."""
        rows = [*replica.partial.values(), *replica.ready, *replica.quarantined.values()]
        self._send_back(replica, rows)

    def _balance(self, replica: ReplicaRecord) -> None:
        """Moves ready rows to a replica with far fewer, where that is worth their prefill."""
        target = lightest(replica, self.pool)
        if target is None:
            return
        chunk = self._dispatcher.chunk(target)
        rows = rows_to_move(replica, target, self.config, chunk)
        if rows:
            self.pool.moved += len(rows)
            self._send_back(replica, rows)
            # The lighter one takes them before this one could take them back.
            self._dispatcher.touch_first(target.id)
