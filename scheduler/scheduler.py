"""The scheduler: events in, actions out, and nothing else.

`Scheduler.step` is the only door. It reads no clock (time is an argument), draws nothing at random
and never raises on a valid event, so the same events give the same actions everywhere: in the pool
actor, in the engine of one process and in the simulator. Events that come late, twice or for
something unknown are recognised and dropped.

Within one step the actions come in this order: Emit and Finish of each request, Release, Dispatch.
A replica that obeys them in order never needs more blocks than it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduler.admission import check_request
from scheduler.config import SchedulerConfig
from scheduler.errors import InvalidRequest
from scheduler.grouping import groups_needed, ideal_size, may_step
from scheduler.integrity import check_pool
from scheduler.messages import (
    Action,
    Cancel,
    Dispatch,
    Emit,
    Event,
    Finish,
    FinishReason,
    Order,
    OrderKind,
    Reject,
    RejectCode,
    Release,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    ReplicaSpec,
    Request,
    RowResult,
    StepDone,
    StepFailed,
    Submit,
    Tick,
)
from scheduler.orders import order_rows, prefill_order, speculate_order
from scheduler.placement import Choice, best_replica, next_rows
from scheduler.pool import Pool
from scheduler.residents import Replica
from scheduler.sequence import Move, Sequence, State, finished_before_start
from scheduler.speculation import DraftPolicy, FixedDraft
from scheduler.status import PoolStatus, pool_status


class Scheduler:
    """One pool of sequences over all replicas; they must all serve the same target."""

    def __init__(
        self, config: SchedulerConfig | None = None, draft_policy: DraftPolicy | None = None
    ) -> None:
        """Without a policy the draft length is the config's, for every order."""
        self.config = config or SchedulerConfig()
        self._pool = Pool(self.config)
        self._policy: DraftPolicy = draft_policy or FixedDraft(self.config.draft_len)
        self._specs: list[ReplicaSpec] = []
        """Distinct specs of the known replicas."""
        self._order_id = 0
        self._rejected = 0
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            ReplicaJoined: self._replica_joined,
            ReplicaDraining: self._replica_draining,
            ReplicaLost: self._replica_lost,
            StepDone: self._step_done,
            StepFailed: self._step_failed,
            Tick: self._tick,
        }
        # What the event in hand has led to; empty between steps.
        self._out: list[Action] = []
        self._released: dict[str, list[str]] = {}
        self._touched: dict[str, None] = {}
        self._offer_to_all = False

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Takes one event at the time `now_s` [seconds, never falling] and says what to do.

        Deadlines are enforced at every event, after the event itself.
        """
        self._handlers[type(event)](event, now_s)
        for sequence in self._pool.overdue(now_s):
            self._finish(sequence, FinishReason.DEADLINE)
        for replica_id, sequence_ids in self._released.items():
            self._out.append(Release(replica_id, tuple(sequence_ids)))
        self._dispatch()
        out, self._out = self._out, []
        self._released.clear()
        self._touched.clear()
        self._offer_to_all = False
        return out

    def check_integrity(self) -> None:
        """Asserts every invariant of the books; for tests, O(everything)."""
        check_pool(self._pool)

    def snapshot(self) -> PoolStatus:
        """The pool as it stands, O(replicas)."""
        return pool_status(self._pool, self._rejected)

    # ----------------------------------------------------------------- events

    def _submit(self, event: Submit, now_s: float) -> None:
        request = event.request
        pool = self._pool
        if request.id in pool.sequences:
            self._reject(request, RejectCode.DUPLICATE, "id", "a request with this id is live")
            return
        try:
            self._check(request)
        except InvalidRequest as error:
            self._reject(request, RejectCode.INVALID, error.field, error.reason)
            return
        full = len(pool.waiting) >= self.config.waiting_requests_max
        if full and not event.accepted_before:
            message = f"{len(pool.waiting)} requests wait already"
            self._reject(request, RejectCode.OVERLOADED, "", message)
            return
        sequence = pool.accept(request, now_s)
        pool.enqueue(sequence)
        reason = finished_before_start(request)
        if reason is not None:
            self._finish(sequence, reason)
            return
        replica = best_replica(sequence, pool.open, pool.free, pool.replicas, self.config)
        if replica is not None:
            self._touched[replica.id] = None

    def _cancel(self, event: Cancel, now_s: float) -> None:
        sequence = self._pool.sequences.get(event.request_id)
        if sequence is not None and sequence.live:
            self._finish(sequence, FinishReason.CANCELLED)

    def _replica_joined(self, event: ReplicaJoined, now_s: float) -> None:
        if event.replica_id in self._pool.replicas:
            return
        unchecked = not self._specs
        self._pool.join(event.replica_id, event.spec)
        self._policy.joined(event.replica_id, event.spec)
        self._note_specs()
        if unchecked:
            # These came while no replica was known that could have refused them.
            for sequence in list(self._pool.waiting.values()):
                try:
                    self._check(sequence.request)
                except InvalidRequest as error:
                    self._finish(sequence, FinishReason.FAILED, str(error))
        self._touched[event.replica_id] = None

    def _replica_draining(self, event: ReplicaDraining, now_s: float) -> None:
        replica = self._pool.replicas.get(event.replica_id)
        if replica is None or replica.draining:
            return
        self._pool.drain(replica)
        self._hand_back(replica)
        # A sequence that had claimed this replica may fit elsewhere.
        self._offer_to_all = True

    def _replica_lost(self, event: ReplicaLost, now_s: float) -> None:
        replica = self._pool.replicas.get(event.replica_id)
        if replica is None:
            return
        self._pool.lose(replica)
        self._policy.lost(replica.id)
        self._note_specs()
        self._offer_to_all = True

    def _step_done(self, event: StepDone, now_s: float) -> None:
        result = event.result
        found = self._end_order(result.replica_id, result.order_id)
        if found is None:
            return
        replica, order = found
        self._policy.observe(order, result)
        committed = 0
        rows = {row.sequence_id: row for row in result.rows}
        for sequence in self._rows_back(replica, order):
            if order.kind is OrderKind.PREFILL:
                self._pool.move(sequence, Move.FILLED)
            else:
                row = rows.get(sequence.id, RowResult(sequence.id))
                committed += self._commit(replica, sequence, row)
        replica.figures.note(order, result, committed)
        if replica.draining:
            self._hand_back(replica)

    def _step_failed(self, event: StepFailed, now_s: float) -> None:
        found = self._end_order(event.replica_id, event.order_id)
        if found is None:
            return
        replica, order = found
        back = []
        for sequence in self._rows_back(replica, order):
            sequence.failures += 1
            if sequence.failures < self.config.failures_max:
                back.append(sequence)
                continue
            done = Move.FILLED if order.kind is OrderKind.PREFILL else Move.STEPPED
            self._pool.move(sequence, done)
            self._finish(sequence, FinishReason.FAILED, event.message)
        self._send_back(replica, back)
        if replica.draining:
            self._hand_back(replica)

    def _tick(self, event: Tick, now_s: float) -> None:
        """Deadlines are enforced at every event, so there is nothing more to do."""

    # ----------------------------------------------------------------- parts of events

    def _check(self, request: Request) -> None:
        """Raises InvalidRequest if every known spec refuses the request."""
        check_request(request, self.config)
        refusal: InvalidRequest | None = None
        for spec in self._specs:
            try:
                check_request(request, self.config, spec)
                return
            except InvalidRequest as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    def _reject(self, request: Request, code: RejectCode, field: str, message: str) -> None:
        self._rejected += 1
        self._out.append(Reject(request.id, code, field, message))

    def _note_specs(self) -> None:
        specs = (replica.spec for replica in self._pool.replicas.values())
        self._specs = list(dict.fromkeys(specs))

    def _end_order(self, replica_id: str, order_id: int) -> tuple[Replica, Order] | None:
        """Takes an order out of flight; None for one that is unknown or was answered before."""
        replica = self._pool.replicas.get(replica_id)
        if replica is None:
            return None
        order = self._pool.end_order(replica, order_id)
        if order is None:
            return None
        self._touched[replica_id] = None
        return replica, order

    def _rows_back(self, replica: Replica, order: Order) -> list[Sequence]:
        """The live rows of an order that has ended; leaving ones are let go."""
        live = []
        for sequence_id in order_rows(order):
            sequence = self._pool.sequences[sequence_id]
            sequence.order_id = None
            if sequence.state is State.LEAVING:
                self._release(replica.id, sequence_id)
                self._pool.let_go(sequence)
            else:
                live.append(sequence)
        return live

    def _commit(self, replica: Replica, sequence: Sequence, row: RowResult) -> int:
        """Books one row's tokens; returns how many count."""
        start = len(sequence.committed)
        replica.lengths_remove(sequence.length)
        tokens, reason = sequence.commit(row)
        replica.lengths_add(sequence.length)
        if tokens:
            self._out.append(Emit(sequence.id, start, tokens))
        self._pool.move(sequence, Move.STEPPED)
        if reason is not None:
            self._finish(sequence, reason)
        return len(tokens)

    def _finish(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        self._out.append(Finish(sequence.id, reason, sequence.usage(), message))
        replica_id = sequence.replica_id
        if sequence.claim is not None:
            self._touched[sequence.claim] = None
        if self._pool.finish(sequence, reason) and replica_id is not None:
            self._release(replica_id, sequence.id)

    def _release(self, replica_id: str, sequence_id: str) -> None:
        self._released.setdefault(replica_id, []).append(sequence_id)
        self._touched[replica_id] = None

    def _send_back(self, replica: Replica, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._release(replica.id, sequence.id)
        if sequences:
            self._pool.send_back(sequences)
            self._offer_to_all = True

    def _hand_back(self, replica: Replica) -> None:
        """A draining replica's ready rows wait again."""
        self._send_back(replica, [replica.residents[row] for row in replica.ready])

    # ----------------------------------------------------------------- orders

    def _dispatch(self) -> None:
        """Gives orders to every replica that the event concerns."""
        replicas = self._pool.replicas
        for replica_id in self._touched:
            if replica_id in replicas:
                self._fill_pipeline(replicas[replica_id])
        if self._offer_to_all:
            for _, replica_id in list(self._pool.open):
                if not self._pool.waiting:
                    return
                self._fill_pipeline(replicas[replica_id])

    def _fill_pipeline(self, replica: Replica) -> None:
        while len(replica.orders) < self.config.orders_in_flight_max:
            order = self._next_order(replica)
            if order is None:
                return
            self._pool.add_order(replica, order)
            self._out.append(Dispatch(order))

    def _next_order(self, replica: Replica) -> Order | None:
        """Free places are filled first, but never by two prefill orders in a row while rows are
        ready, so that neither waiting nor ready rows starve."""
        pool = self._pool
        ready = len(replica.ready)
        choice = Choice()
        if pool.waiting:
            choice = next_rows(replica, pool.waiting, pool.open, pool.replicas, self.config)
            if choice.claim is not None:
                pool.claim(choice.claim, replica)
        if choice.rows and not (ready and replica.last_kind is OrderKind.PREFILL):
            return self._prefill(replica, choice)
        if may_step(
            ready, replica.stepping, replica.prefilling, len(replica.orders), self.config.rows_max
        ):
            return self._speculate(replica, someone_waits=bool(choice.rows))
        return None

    def _prefill(self, replica: Replica, choice: Choice) -> Order:
        order_id = self._new_order_id()
        for sequence, count in choice.overtaken:
            sequence.overtaken += count
        for sequence in choice.rows:
            self._pool.place(sequence, replica)
            sequence.order_id = order_id
        return prefill_order(order_id, replica.id, choice.rows)

    def _speculate(self, replica: Replica, someone_waits: bool) -> Order:
        config = self.config
        order_id = self._new_order_id()
        count = len(replica.ready) + replica.stepping
        alone = not (someone_waits or replica.stepping or replica.prefilling)
        taken = replica.ready.take(
            ideal_size(count, config.rows_max),
            config.rows_max,
            groups_needed(count, config.rows_max),
            config.passes_max,
        )
        sequences = [replica.residents[sequence_id] for sequence_id in taken]
        for sequence in sequences:
            self._pool.move(sequence, Move.STEP)
            sequence.order_id = order_id
        draft_len = min(self._policy.draft_len(replica.id, sequences), replica.spec.draft_len_max)
        # Rows that wait would wait longer; where there are none, round trips are saved.
        steps = config.steps_per_order_max if alone and not replica.ready else 1
        return speculate_order(order_id, replica.id, sequences, draft_len, steps)

    def _new_order_id(self) -> int:
        self._order_id += 1
        return self._order_id
