"""What each replica does next: fills the pipelines with prefill and speculate batches.

It is told which replicas an event concerns and appends the actions. Knows placement, grouping and
blocks; nothing of the events that led here.

A Release that comes from here (KV blocks ran out) stands before the batch that needs its blocks. An
batch of several steps is interrupted as soon as another goes behind it: somebody waits now.
"""

from __future__ import annotations

from scheduler.batching.batches import prefill_batch, speculate_batch
from scheduler.batching.cutting import part_of
from scheduler.batching.grouping import may_step
from scheduler.batching.placement import Choice, best_replica, next_rows, shunned
from scheduler.batching.prefill import (
    batches_since,
    chunks,
    chunks_at_once,
    goes_first,
    oldest_partial,
    room_for_waiting,
)
from scheduler.config import SchedulerConfig
from scheduler.draft_length.policy import DraftPolicy
from scheduler.messages import Action, Batch, BatchKind, Dispatch, Interrupt, Release
from scheduler.state.pool import Pool
from scheduler.state.replica import Replica
from scheduler.state.sequence import Sequence, State
from scheduler.validation import blocks_needed


class Dispatcher:
    """Gives batches to the replicas that were touched; keeps no state between two events."""

    def __init__(self, config: SchedulerConfig, pool: Pool, policy: DraftPolicy) -> None:
        self._config = config
        self._pool = pool
        self._policy = policy
        self._batch_id = 0
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

    def offer_to_all(self) -> None:
        """Somebody waits who could go anywhere."""
        self._offer_to_all = True

    def run(self, out: list[Action], now_s: float) -> None:
        """Appends the batches of every replica that the event concerns."""
        self._out = out
        self._now_s = now_s
        replicas = self._pool.replicas
        # While batches are made blocks may run out and claims end: then others are touched.
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

    def interrupt(self, replica: Replica, out: list[Action]) -> None:
        """Ends the order of several steps, if one is in flight."""
        if replica.long is not None:
            out.append(Interrupt(replica.id, replica.long))
            replica.long = None

    # ----------------------------------------------------------------- batches

    def _fill_pipeline(self, replica: Replica) -> None:
        while len(replica.batches) < self._config.batches_in_flight_max:
            preempted = self._pool.preempted
            batch = self._next_batch(replica)
            if batch is None:
                if self._pool.preempted > preempted:
                    continue
                return
            self.interrupt(replica, self._out)
            self._pool.add_batch(replica, batch, self._now_s)
            self._out.append(Dispatch(batch))

    def _next_batch(self, replica: Replica) -> Batch | None:
        """Suspects first, by themselves. Then free places are filled, in chunks that take turns
        with steps; see `prefilling`."""
        if replica.alone is not None:
            return None
        self._drop_vain_claim(replica)
        if replica.batches and self._clears(replica):
            self.interrupt(replica, self._out)
            return None
        if replica.suspects and not (replica.last_alone and replica.ready):
            return self._step_suspects(replica)
        broke = BatchKind.SPECULATE in replica.fails
        if (broke or replica.last_alone) and replica.ready and not replica.batches:
            # Is it the replica or the row? Others show it before the row comes back. And between
            # any two batches of suspects those that are none take one step.
            rows_max = replica.rows_max(self._config.rows_max)
            return self._step_ready(replica, rows_max, someone_waits=True)
        pool = self._pool
        ready, stepping = len(replica.ready), replica.stepping
        to_fill = False
        # Nearly always a full replica has nothing to fill, and then nothing of it is worked out.
        if replica.partial or (pool.waiting and replica.load < self._config.residents_max):
            at_once = chunks_at_once(replica, replica.rows_max(self._config.rows_max))
            budget = self._prefill_tokens(replica, at_once)
            choice = self._next_rows(replica, budget)
            if choice.claim is not None and replica.batches and self._clears(replica):
                self.interrupt(replica, self._out)
                return None
            to_fill = bool(choice.rows or replica.partial)
            if not choice.rows:
                replica.gathers_until = None
            if to_fill:
                if self._is_earned(replica, choice, budget, at_once) and goes_first(
                    replica, choice.rows, budget, self._config.gather_batches
                ):
                    return self._prefill(replica, choice, budget)
                # It waits for what is in flight, and no longer than for one step of it.
                self.interrupt(replica, self._out)
        else:
            replica.gathers_until = None
        rows_max = replica.rows_max(self._config.rows_max)
        apart = replica.cut and ready and stepping and self._stands_apart(replica, rows_max)
        if apart or may_step(ready, stepping, replica.joining, len(replica.batches), rows_max):
            return self._step_ready(replica, rows_max, someone_waits=to_fill)
        return None

    def chunk(self, replica: Replica) -> int:
        """Tokens of the next prefill batch, if it is of one chunk."""
        return self._prefill_tokens(replica, 1)

    def _prefill_tokens(self, replica: Replica, at_once: int) -> int:
        """What a batch of so many chunks may fill."""
        begun = oldest_partial(replica)
        return self._policy.prefill_tokens(
            replica.id,
            len(replica.ready) + replica.stepping,
            self._config.prefill_tokens_max,
            at_once,
            0 if begun is None else begun.filled,
        )

    def _is_earned(self, replica: Replica, choice: Choice, budget: int, at_once: int) -> bool:
        """Whether as many decode batches went as what would be filled has chunks."""
        since = max(batches_since(replica), 1)
        if since >= at_once or not replica.ready:
            return True
        if choice.rows and choice.rows[0].rows_limit is not None:
            return True
        given = chunks(replica, choice.rows, budget, self._config)
        tokens = sum(until - begin for _, begin, until in given)
        return tokens <= self._prefill_tokens(replica, since)

    def _next_rows(self, replica: Replica, budget: int) -> Choice:
        """Who of those that wait goes into a prefill batch of so many tokens."""
        pool = self._pool
        if not pool.waiting:
            return Choice()
        room = room_for_waiting(replica, budget, self._config)
        choice = next_rows(replica, pool.waiting, pool.open, pool.replicas, self._config, room)
        for sequence in choice.left:
            sequence.left += 1
        if choice.claim is not None:
            pool.claim(choice.claim, replica)
        return choice

    def _drop_vain_claim(self, replica: Replica) -> None:
        """Who claimed a replica when it was the only one may have failed on it, and there are
        others now: then it goes to one of them."""
        if replica.claimed_by is None:
            return
        claimant = self._pool.waiting[replica.claimed_by]
        if shunned(replica, claimant, self._pool.open, self._pool.replicas):
            self._pool.drop_claim(claimant)
            self._offer_to_all = True

    def _clears(self, replica: Replica) -> bool:
        """Whether the replica finishes what is in flight because suspects go next."""
        if replica.suspects:
            return True
        claimant = replica.claimed_by
        return claimant is not None and self._pool.waiting[claimant].rows_limit is not None

    def _prefill(self, replica: Replica, choice: Choice, budget: int) -> Batch:
        """Chunks of the chosen rows and of those that were begun."""
        batch_id = self._new_batch_id()
        replica.gathers_until = None
        replica.prefilled_at = replica.ready.batches
        for sequence, count in choice.overtaken:
            sequence.overtaken += count
        given = chunks(replica, choice.rows, budget, self._config)
        for sequence in choice.rows:
            if sequence.claim is not None:
                self.touch(sequence.claim)
            self._pool.place(sequence, replica)
        self._pool.fill(replica, given, batch_id)
        if given[0][0].rows_limit is not None:
            replica.alone = batch_id
        return prefill_batch(batch_id, replica.id, given)

    def _step_ready(self, replica: Replica, rows_max: int, someone_waits: bool) -> Batch | None:
        whole = self._choose(replica, rows_max)
        rows = self._cut(replica, whole, rows_max)
        if len(rows) < len(whole):
            replica.cut = True
        elif not replica.stepping:
            replica.cut = False
        # Rows that wait would wait longer; where there are none, round trips are saved. A client's
        # first token waits for no second one.
        alone = not (someone_waits or replica.stepping or replica.prefilling)
        steps_most = 1
        if alone and len(rows) == len(replica.ready) and all(one.committed for one in rows):
            steps_most = self._config.steps_per_batch_max
        return self._step(replica, rows, steps_most)

    def _choose(self, replica: Replica, rows_max: int) -> list[Sequence]:
        groups = replica.groups(rows_max)
        return replica.ready.choose(rows_max, groups, self._config.wait_rounds)

    def _cut(self, replica: Replica, rows: list[Sequence], rows_max: int) -> list[Sequence]:
        """What is left of a group whose rows lie too far apart to read together, unless somebody
        cannot wait any longer."""
        apart = self._policy.apart(replica.id)
        if (rows[-1].length - rows[0].length) * (len(rows) - 1) <= apart:
            return rows
        ready, groups = replica.ready, replica.groups(rows_max)
        wait_rounds = self._config.wait_rounds
        if ready.is_due(wait_rounds, groups):
            return rows
        anchor = ready.anchor_of(rows, wait_rounds, groups)
        begin, end = part_of([one.length for one in rows], rows.index(anchor), apart)
        return rows[begin:end]

    def _stands_apart(self, replica: Replica, rows_max: int) -> bool:
        """Whether the next group, where groups are cut, need not wait for any row that steps: it
        would be cut from all of them."""
        rows = self._cut(replica, self._choose(replica, rows_max), rows_max)
        stepping = [one for one in replica.residents.values() if one.state is State.STEPPING]
        every = sorted([*rows, *stepping], key=lambda one: one.length)
        lengths = [one.length for one in every]
        begin, end = part_of(lengths, every.index(rows[0]), self._policy.apart(replica.id))
        return all(one.state is State.READY for one in every[begin:end])

    def _step_suspects(self, replica: Replica) -> Batch | None:
        limit = replica.rows_max(self._config.rows_max)
        rows: list[Sequence] = []
        for sequence in replica.suspects.values():
            assert sequence.rows_limit is not None
            limit = min(limit, sequence.rows_limit)
            if len(rows) >= limit:
                break
            rows.append(sequence)
        rows.sort(key=lambda one: one.length)
        batch = self._step(replica, rows, steps_most=1)
        if batch is not None:
            replica.alone = batch.id
        return batch

    def _step(self, replica: Replica, rows: list[Sequence], steps_most: int) -> Batch | None:
        """Some steps of these ready rows, by rising length; None if blocks ran out."""
        plan = self._policy.plan(replica.id, rows, steps_most)
        draft_len, steps = plan.draft_len, plan.steps
        lacking, growth = _lacking(replica, rows, steps, draft_len)
        if steps > 1 and growth > replica.blocks_free:
            steps = 1
            lacking, growth = _lacking(replica, rows, steps, draft_len)
        if growth > replica.blocks_free:
            # What is in flight may end and free blocks; and its rows may be the ones to go.
            if not replica.batches:
                self._preempt(replica)
            return None
        batch_id = self._new_batch_id()
        self._pool.step(replica, rows, lacking, batch_id)
        return speculate_batch(
            batch_id, replica.id, rows, draft_len, steps, plan.verify_tokens, plan.least
        )

    def _preempt(self, replica: Replica) -> None:
        """KV blocks ran out: the youngest sequence of the lowest priority waits again with its
        tokens, in the order of its class. But none goes twice: whoever was sent back once has all
        blocks that it may need, so it is not the cause, and there is another who is."""
        residents = [one for one in replica.residents.values() if not one.preempted]
        assert residents, f"replica {replica.id}: blocks ran out though all are set aside"
        victim = max(residents, key=lambda one: (one.request.priority, one.number))
        self._pool.send_back([victim], first=False)
        self._pool.preempted += 1
        victim.preempted = True
        self._out.append(Release(replica.id, (victim.id,)))
        pool = self._pool
        best = best_replica(victim, pool.open, pool.free, pool.replicas, self._config)
        if best is not None:
            self.touch(best.id)

    def _new_batch_id(self) -> int:
        self._batch_id += 1
        return self._batch_id


def _lacking(
    replica: Replica, rows: list[Sequence], steps: int, draft_len: int
) -> tuple[list[tuple[Sequence, int]], int]:
    """Rows whose blocks do not last for all that they can hold after so many steps, each with those
    that it needs; and how many that is more."""
    ahead = steps * (draft_len + 1)
    block_size = replica.spec.block_size
    lacking, growth = [], 0
    for one in rows:
        if one.length + ahead > one.blocks * block_size:
            needed = blocks_needed(min(one.length + ahead, one.length_max), block_size)
            if needed > one.blocks:
                lacking.append((one, needed))
                growth += needed - one.blocks
    return lacking, growth
