"""The pool: all live sequences, the queue of the waiting ones, and the replicas' records.

It keeps the books (reservations, indexes, deadlines) consistent and decides nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from itertools import count, takewhile

from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason, ReplicaSpec, Request, RowResult
from scheduler.state.replica_record import ReplicaRecord
from scheduler.state.sequence import IN_FLIGHT, Chunk, Move, Sequence, State
from scheduler.state.waiting import WaitingQueue

RATE_S = 5.0
"""Time over which the rate of tokens is a mean."""
REACHED_RECENT = 0.02
"""Weight of the last request in what is expected of others."""


class RateMeter:
    """Tokens per second: a mean that forgets, so that what is RATE_S old counts a third."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at_s = 0.0

    def add(self, tokens: int, now_s: float) -> None:
        self._rate = self.per_s(now_s) + tokens / RATE_S
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        """0 where nothing was added for twice RATE_S."""
        if now_s - self._at_s > 2 * RATE_S:
            return 0.0
        return self._rate * math.exp((self._at_s - now_s) / RATE_S)


class Pool:
    """Books of one pool. Every method is O(log n) or less, except where it says so."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.sequences: dict[str, Sequence] = {}
        """Admitted and not yet let go: also leaving sequences, whose id is still taken."""
        self.waiting = WaitingQueue(config.priority_age_s)
        self.replicas: dict[str, ReplicaRecord] = {}
        self.specs: list[ReplicaSpec] = []
        """Distinct ones of the replicas."""
        self._open: list[tuple[int, str]] | None = None
        self.finished: Counter[FinishReason] = Counter()
        self.deadlines: list[tuple[float, int, str]] = []
        """(deadline, number, id) of the live sequences that have one, the first due first."""
        self.limit_left = 0
        """Tokens that live sequences may still commit."""
        self.expected_share = 1.0
        """The part of their limits that requests have committed lately, and are expected to."""
        self.rate = RateMeter()
        """Committed tokens."""
        self.recovered = self.preempted = self.moved = 0
        """How often a sequence lost its place: for any reason, for want of KV blocks, and to be
        moved to a lighter replica."""
        self._numbers = count()

    # ----------------------------------------------------------------- sequences

    def admit(self, request: Request, now_s: float) -> Sequence:
        """A new record, not yet in the queue."""
        sequence = Sequence(request, next(self._numbers), now_s, committed=list(request.committed))
        self.sequences[request.id] = sequence
        self.limit_left += sequence.tokens_left
        if request.timeout_s is not None:
            sequence.deadline_s = now_s + request.timeout_s
            insort(self.deadlines, (sequence.deadline_s, sequence.number, sequence.id))
        return sequence

    def expected(self, limit: int) -> int:
        """Tokens to expect of so many that may come: most requests end before their limit."""
        return math.ceil(limit * self.expected_share)

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that live sequences are expected to commit yet."""
        return self.expected(self.limit_left)

    def live_count(self) -> int:
        """Sequences whose Finish is not out. O(rows in flight)."""
        leaving = sum(len(replica.rows_in(State.LEAVING)) for replica in self.replicas.values())
        return len(self.sequences) - leaving

    def takes_more(self, replica: ReplicaRecord) -> bool:
        return not replica.draining and replica.load < self.config.residents_max

    @property
    def open(self) -> list[tuple[int, str]]:
        """(load, id) of the replicas that take sequences, the lightest first. Loads change often
        and are read seldom, so they are sorted when they are read."""
        if self._open is None:
            takers = filter(self.takes_more, self.replicas.values())
            self._open = sorted((replica.load, replica.id) for replica in takers)
        return self._open

    def place(self, sequence: Sequence, replica: ReplicaRecord, now_s: float) -> None:
        """From the queue to a replica: reserves blocks until it leaves or is sent back."""
        self.waiting.remove(sequence)
        self.drop_reservation(sequence)
        sequence.replica_id = replica.id
        replica.note_prefix(sequence)
        replica.give_room(sequence, replica.room_for(sequence))
        if not sequence.replicas:
            self.waiting.charge(sequence)
            sequence.queued_s = now_s - sequence.arrived_s
        if replica.id not in sequence.replicas:
            sequence.replicas.append(replica.id)
        replica.residents[sequence.id] = sequence
        self._open = None

    def begin_prefill(self, given: list[Chunk], batch_id: int) -> None:
        """A prefill batch takes these placed sequences."""
        for sequence, _, until in given:
            self.move(sequence, Move.PREFILL)
            sequence.prefilled = until
            sequence.batch_id = batch_id

    def end_prefill(self, replica: ReplicaRecord, sequence: Sequence, reused: int) -> None:
        """A prefill batch with it is done; its replica had `reused` positions before."""
        sequence.prefilled = max(sequence.prefilled, reused)
        if not sequence.recovered:
            sequence.cached_tokens += min(reused, len(sequence.request.prompt))
        replica.figures.reused_tokens += reused
        whole = sequence.prefilled == sequence.prefill_len
        self.move(sequence, Move.PREFILLED if whole else Move.CHUNK)

    def step(
        self,
        replica: ReplicaRecord,
        rows: list[Sequence],
        lacking: list[tuple[Sequence, int]],
        batch_id: int,
    ) -> None:
        """A speculate batch takes these ready rows, all in quarantine or none.

        `lacking` are those of them that get more room, and the blocks of tokens they have then.
        """
        if not rows[0].quarantined:
            replica.ready.take(rows, len(replica.ready) + replica.stepping)
        for sequence, blocks in lacking:
            replica.give_room(sequence, blocks)
        for sequence in rows:
            self.move(sequence, Move.STEP)
            sequence.batch_id = batch_id

    def commit(
        self, sequence: Sequence, row: RowResult
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Books what a step committed of this row, which is ready again. Returns what the
        sequence's `commit` does."""
        tokens, reason = sequence.commit(row)
        self.limit_left -= len(tokens)
        self.move(sequence, Move.STEPPED)
        return tokens, reason

    def move(self, sequence: Sequence, move: Move) -> None:
        """Changes the state and keeps the replica's rows in step with it."""
        before = sequence.state
        sequence.move(move)
        if sequence.replica_id is None:
            return
        replica = self.replicas[sequence.replica_id]
        after = sequence.state
        if after not in IN_FLIGHT:
            sequence.batch_id = None
        if before is State.PARTIAL:
            del replica.partial[sequence.id]
        elif after is State.PARTIAL:
            replica.partial[sequence.id] = sequence
        if before is State.READY:
            if sequence in replica.ready:
                replica.ready.remove(sequence)
            replica.quarantined.pop(sequence.id, None)
        elif after is State.READY:
            replica.ready_again(sequence)

    def send_back(self, sequences: Iterable[Sequence], first: bool = True) -> None:
        """Residents that lost their place wait again; with `first` before all classes."""
        for sequence in sequences:
            self.move(sequence, Move.RETURN)
            self._vacate(sequence)
            sequence.recovered += 1
            self.recovered += 1
            self.waiting.add(sequence, first)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """The sequence ends; returns whether its blocks are free at once.

        They are not while a batch in flight holds its row: then it is leaving until `let_go`.
        """
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            self.drop_reservation(sequence)
        if sequence.deadline_s is not None:
            del self.deadlines[bisect_left(self.deadlines, (sequence.deadline_s, sequence.number))]
        self.limit_left -= sequence.tokens_left
        self.move(sequence, Move.FINISH)
        self.finished[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            share = len(sequence.committed) / sequence.request.max_new_tokens
            self.expected_share += REACHED_RECENT * (share - self.expected_share)
        if sequence.state is State.LEAVING:
            return False
        self._forget(sequence)
        return True

    def let_go(self, sequence: Sequence) -> None:
        """The batch that held a leaving row has ended."""
        self.move(sequence, Move.LET_GO)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        if sequence.replica_id is not None:
            self._vacate(sequence)
        del self.sequences[sequence.id]

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.replica_id is not None
        replica = self.replicas[sequence.replica_id]
        replica.note_prefix(sequence)
        del replica.residents[sequence.id]
        replica.give_room(sequence, 0)
        sequence.prefilled = 0
        sequence.turn = -math.inf
        sequence.replica_id = None
        sequence.batch_id = None
        self._open = None

    # ----------------------------------------------------------------- reservations

    def reserve(self, sequence: Sequence, replica: ReplicaRecord) -> None:
        """Until the sequence is placed the replica takes nothing behind it in the queue."""
        sequence.reservation = replica.id
        replica.reserved_for = sequence.id

    def drop_reservation(self, sequence: Sequence) -> None:
        if sequence.reservation is not None:
            self.replicas[sequence.reservation].reserved_for = None
            sequence.reservation = None

    def _clear_reservation(self, replica: ReplicaRecord) -> None:
        if replica.reserved_for is not None:
            self.drop_reservation(self.sequences[replica.reserved_for])

    # ----------------------------------------------------------------- replicas

    def join(self, replica_id: str, spec: ReplicaSpec) -> None:
        self.replicas[replica_id] = ReplicaRecord(replica_id, spec, self.config.kv_reserve)
        self._replicas_changed()

    def drain(self, replica: ReplicaRecord) -> None:
        """No new sequence from now on. O(1) but for the index."""
        replica.draining = True
        self._clear_reservation(replica)
        self._open = None

    def lose(self, replica: ReplicaRecord) -> None:
        """Forgets the replica and its batches; its live residents wait again. O(residents)."""
        self._clear_reservation(replica)
        residents = list(replica.residents.values())
        for sequence in residents:
            if not sequence.live:
                self.let_go(sequence)
        self.send_back([sequence for sequence in residents if sequence.live])
        del self.replicas[replica.id]
        self._replicas_changed()

    def _replicas_changed(self) -> None:
        self.specs = list(dict.fromkeys(replica.spec for replica in self.replicas.values()))
        self._open = None

    # ----------------------------------------------------------------- deadlines

    def overdue(self, now_s: float) -> list[Sequence]:
        """Live sequences with a deadline that has come."""
        due = takewhile(lambda key: key[0] <= now_s, self.deadlines)
        return [self.sequences[sequence_id] for _, _, sequence_id in due]
