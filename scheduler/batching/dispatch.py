"""What each replica does next, by rules in this order:

| | if | then |
|---|---|---|
| 1 | a batch of rows in quarantine is in flight | nothing goes beside it |
| 2 | rows in quarantine are ready, or one has reserved the replica and fits; others are in flight | those in flight end first |
| 3 | rows in quarantine are ready; the last batch was not theirs, or no other row is ready | they take a step by themselves |
| 4 | other rows are ready, nothing is in flight; the last batch was one of rows in quarantine | the others take one step |
| 5 | a sequence that waits does not fit, or is in quarantine and cannot go yet | it reserves the replica |
| 6 | prompts can be filled; the last batch was no prefill, or no row is ready | a chunk of prompts |
| 7 | ready rows are worth a batch | they step; several times if no other row waits |
| 8 | else | nothing |

So between two batches of rows in quarantine the others take a step, which shows whether the replica
works; and prefills take turns with steps, so that neither waits for long.

The dispatcher is told which replicas an event concerns and appends the actions. It knows nothing of
the events. A Release that comes from here (KV blocks ran out) stands before the batch that needs
the blocks. A batch of several steps is interrupted as soon as other rows wait for it.
"""  # noqa: E501

from __future__ import annotations

from itertools import count

from scheduler.batching.grouping import batches_per_round, choose_rows, may_step, rows_of_turn
from scheduler.batching.placement import Placement, best_replica, has_room, next_placement
from scheduler.batching.prefill import chunks_of_begun, oldest_partial
from scheduler.config import SchedulerConfig
from scheduler.draft_length import DraftPolicy, StepPlan
from scheduler.faults import excluded
from scheduler.messages import (
    Action,
    Batch,
    BatchKind,
    Dispatch,
    Interrupt,
    PrefillRow,
    Release,
    StepRow,
)
from scheduler.state import Pool, ReplicaRecord, Sequence
from scheduler.validation import blocks_needed


class Dispatcher:
    """Gives batches to the replicas that were touched. Between two events it keeps the next batch's
    number and nothing else."""

    def __init__(self, config: SchedulerConfig, pool: Pool, policy: DraftPolicy) -> None:
        self._config = config
        self._pool = pool
        self._policy = policy
        self._batch_ids = count(1)
        self._touched: dict[str, None] = {}
        self._offer_to_all = False
        self._out: list[Action] = []
        self._now_s = 0.0

    def touch(self, replica_id: str) -> None:
        """The replica may have something new to do."""
        self._touched[replica_id] = None

    def touch_first(self, replica_id: str) -> None:
        """The same, and before the others: it is to take what waits."""
        self._touched = {replica_id: None, **self._touched}

    def offer(self, sequence: Sequence) -> None:
        """It waits: the replica that it would go to has something new to do, if any has room."""
        best = best_replica(sequence, self._pool)
        if best is not None:
            self.touch(best.id)

    def offer_to_all(self) -> None:
        """A sequence waits that could go anywhere."""
        self._offer_to_all = True

    def run(self, out: list[Action], now_s: float) -> None:
        """Appends the batches of every replica that the event concerns."""
        self._out = out
        self._now_s = now_s
        replicas = self._pool.replicas
        # While batches are made blocks may run out and reservations end: then others are touched.
        while self._touched or self._offer_to_all:
            touched, self._touched = self._touched, {}
            for replica_id in touched:
                if replica_id in replicas:
                    self._fill_pipeline(replicas[replica_id])
            if self._offer_to_all:
                self._offer_to_all = False
                for _, replica_id in list(self._pool.open):
                    if not self._pool.waiting:
                        break
                    self._fill_pipeline(replicas[replica_id])

    def interrupt(self, replica: ReplicaRecord, out: list[Action]) -> None:
        """Ends the batch of several steps, if one is in flight."""
        long = replica.pipeline.long_batch()
        if long is not None:
            out.append(Interrupt(replica.id, long.batch.id))
            long.interrupted = True

    def chunk(self, replica: ReplicaRecord) -> int:
        """KV positions that the next prefill batch may fill, in [1, prefill_tokens_max]."""
        begun = oldest_partial(replica)
        return self._policy.prefill_tokens(
            replica.id,
            len(replica.ready) + replica.stepping,
            self._config.prefill_tokens_max,
            begin=0 if begun is None else begun.prefilled,
        )

    def _fill_pipeline(self, replica: ReplicaRecord) -> None:
        self._drop_vain_reservation(replica)
        while len(replica.pipeline) < self._config.batches_in_flight_max:
            if not self._next(replica):
                return

    def _next(self, replica: ReplicaRecord) -> bool:
        """Does what the first rule says that holds. Returns whether anything has changed that may
        lead to another batch."""
        pipeline, ready = replica.pipeline, len(replica.ready)
        if pipeline.quarantined:
            return False
        if pipeline.batches and self._quarantine_is_next(replica):
            self.interrupt(replica, self._out)
            return False
        if replica.quarantined and not (pipeline.last_quarantined and ready):
            return self._step(replica, self._rows_in_quarantine(replica), 1)
        if ready and pipeline.last_quarantined:
            return self._step(replica, self._next_rows(replica), 1)
        prompts_wait = False
        # Nearly always a full replica has nothing to fill, and then nothing of it is worked out.
        if replica.partial or (self._pool.waiting and self._pool.takes_more(replica)):
            tokens = self.chunk(replica)
            placement = next_placement(replica, self._pool, tokens)
            if placement.reserve is not None:
                self._pool.reserve(placement.reserve, replica)
                return True
            # Now, or after the next step.
            prompts_wait = bool(placement.chunks or replica.partial)
            if prompts_wait and not (ready and pipeline.last_kind is BatchKind.PREFILL):
                self._prefill(replica, placement, tokens)
                return True
        if not ready:
            return False
        rows_max, joining = replica.rows_max(self._config.rows_max), replica.joining
        rows_max, gap = self._turn(replica) or rows_max, self._policy.short_gap(replica.id)
        if not may_step(ready, replica.stepping, joining, rows_max, short_gap=gap):
            return False
        rows = self._next_rows(replica)
        # Rows that wait would wait longer; where there are none, round trips are saved. A client's
        # first token waits for no second one.
        others = prompts_wait or replica.pipeline.batches
        steps_most = 1
        if not others and len(rows) == ready and all(row.committed for row in rows):
            steps_most = self._config.steps_per_batch_max
        return self._step(replica, rows, steps_most)

    def _quarantine_is_next(self, replica: ReplicaRecord) -> bool:
        """Whether rows in quarantine are to go next, here or from the queue."""
        if replica.quarantined:
            return True
        if replica.reserved_for is None:
            return False
        sequence = self._pool.waiting[replica.reserved_for]
        return sequence.quarantined and has_room(replica, sequence, self._pool)

    def _drop_vain_reservation(self, replica: ReplicaRecord) -> None:
        """A sequence that reserved the only replica may have failed on it. If there is another now,
        it goes there once that one has room."""
        if replica.reserved_for is None:
            return
        sequence = self._pool.waiting[replica.reserved_for]
        if excluded(replica, sequence, self._pool):
            self._pool.drop_reservation(sequence)

    def _prefill(self, replica: ReplicaRecord, placement: Placement, tokens: int) -> None:
        """Chunks of the chosen rows and of those that were begun."""
        given = placement.chunks
        if placement.tokens_left is not None:
            places = self._config.prefill_rows_max - len(given) - 1
            given = given + chunks_of_begun(replica, places, tokens, placement.tokens_left)
        for sequence, _, _ in placement.chunks:
            if sequence.reservation is not None:
                self.touch(sequence.reservation)
            self._pool.place(sequence, replica, self._now_s)
        prefill = tuple(_prefill_row(*chunk) for chunk in given)
        batch = Batch(next(self._batch_ids), replica.id, BatchKind.PREFILL, prefill=prefill)
        self._pool.begin_prefill(given, batch.id)
        self._send(replica, batch, [sequence for sequence, _, _ in given])

    def _next_rows(self, replica: ReplicaRecord) -> list[Sequence]:
        """Ready rows of near length."""
        rows_max, turn = replica.rows_max(self._config.rows_max), self._turn(replica)
        wait_rounds = self._config.wait_rounds if turn is None else max(self._config.wait_rounds, 2)
        per_round = batches_per_round(len(replica.ready) + replica.stepping, turn or rows_max)
        return choose_rows(replica.ready, rows_max, per_round, wait_rounds, turn)

    def _turn(self, replica: ReplicaRecord) -> int | None:
        """Rows of each of two batches that take turns, on a replica that drafts one while it checks
        the other; None where a batch has all rows that it can have. Needs a ready row."""
        rows = len(replica.ready) + replica.stepping
        if not replica.spec.overlaps or rows == 1 or self._config.batches_in_flight_max == 1:
            return None
        rows_max = replica.rows_max(self._config.rows_max)
        whole, turn = min(rows, rows_max), rows_of_turn(rows, rows_max)
        if turn == whole or self._policy.turns_pay(replica.id, list(replica.ready), whole, turn):
            return turn
        return None

    def _rows_in_quarantine(self, replica: ReplicaRecord) -> list[Sequence]:
        """The ones that wait longest, no more than each of them may run with."""
        limit = replica.rows_max(self._config.rows_max)
        rows: list[Sequence] = []
        for sequence in replica.quarantined.values():
            assert sequence.record.rows_limit is not None
            limit = min(limit, sequence.record.rows_limit)
            if len(rows) < limit:
                rows.append(sequence)
        return sorted(rows, key=lambda row: row.length)

    def _step(self, replica: ReplicaRecord, rows: list[Sequence], steps_most: int) -> bool:
        """Some steps of these ready rows, by rising length. Where blocks run out, a sequence is
        sent back, if nothing is in flight that may free some."""
        in_turns = not rows[0].quarantined and self._turn(replica) is not None
        plan = self._policy.plan(replica.id, rows, steps_most, in_turns)
        lacking, growth = _lacking(replica, rows, plan)
        if plan.steps > 1 and growth > replica.blocks_free:
            return self._step(replica, rows, 1)
        if growth > replica.blocks_free:
            if replica.pipeline.batches:
                return False
            self._preempt(replica)
            return True
        batch_id = next(self._batch_ids)
        self._pool.step(replica, rows, lacking, batch_id)
        step_rows = tuple(
            [
                StepRow(row.id, row.length, draft_len, row.blocks)
                for row, draft_len in zip(rows, plan.draft_lens, strict=True)
            ]
        )
        batch = Batch(
            batch_id,
            replica.id,
            BatchKind.SPECULATE,
            rows=step_rows,
            draft_len=plan.draft_len,
            steps=plan.steps,
        )
        self._send(replica, batch, rows)
        return True

    def _send(self, replica: ReplicaRecord, batch: Batch, rows: list[Sequence]) -> None:
        self.interrupt(replica, self._out)
        replica.pipeline.send(batch, rows, self._now_s)
        self._out.append(Dispatch(batch))

    def _preempt(self, replica: ReplicaRecord) -> None:
        """KV blocks ran out: the youngest sequence of the lowest priority waits again with its
        tokens, in the order of its class. None goes twice: a sequence that was sent back once has
        all blocks that it may need, so it is not the cause, and another is."""
        residents = [resident for resident in replica.residents.values() if not resident.preempted]
        assert residents, f"replica {replica.id}: blocks ran out though all are set aside"
        victim = max(residents, key=lambda resident: (resident.request.priority, resident.number))
        self._pool.send_back([victim], first=False)
        self._pool.preempted += 1
        victim.preempted = True
        self._out.append(Release(replica.id, (victim.id,)))
        self.offer(victim)


def _prefill_row(sequence: Sequence, begin: int, until: int) -> PrefillRow:
    """One that begins at 0 is new to the replica and comes with all its content."""
    return PrefillRow(
        sequence_id=sequence.id,
        tokens=() if begin else sequence.content(),
        tokens_left=sequence.tokens_left,
        sampling=sequence.request.sampling,
        stop_token_ids=sequence.request.stop_token_ids,
        blocks=sequence.blocks,
        begin=begin,
        until=until,
        salt="" if begin else sequence.salt,
        decoding=None if begin else sequence.request.decoding,
    )


def _lacking(
    replica: ReplicaRecord, rows: list[Sequence], plan: StepPlan
) -> tuple[list[tuple[Sequence, int]], int]:
    """Rows whose room does not last for all that they can hold after these steps, each with the
    blocks of tokens that it needs; and how many blocks more they take then."""
    # A draft ahead takes no blocks: those of the step after these are there.
    ahead = (plan.steps + replica.spec.overlaps) * (plan.draft_len + 1)
    block_size, taken = replica.spec.block_size, replica.spec.blocks_taken
    lacking, growth = [], 0
    for row in rows:
        needed = blocks_needed(min(row.length + ahead, row.length_max), block_size)
        if needed > row.blocks:
            lacking.append((row, needed))
            growth += taken(needed) - taken(row.blocks)
    return lacking, growth
