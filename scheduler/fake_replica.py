"""A replica without a model: it obeys batches as a real one does and asserts what a real one would.

Its target is the *perfect world*, a hash of all content so far: one wrong, missing or doubled token
anywhere changes every token after it. Which draft tokens are accepted is drawn from a generator
that is passed in, so the draft changes how many tokens a step commits and never which.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from scheduler.admission import blocks_needed
from scheduler.messages import (
    Batch,
    BatchKind,
    FinishReason,
    PrefillRow,
    Release,
    ReplicaSpec,
    Request,
    RowResult,
    StepResult,
    StepTimes,
)
from scheduler.prefixes import PrefixSet, block_keys
from scheduler.sequence import finished_before_start, truncate

_MASK = 2**64 - 1


def fold(state: int, tokens: Iterable[int]) -> int:
    """The content's hash after further tokens; 0 is the hash of no content."""
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1442695040888963407) & _MASK
    return state


def next_token(state: int, seed: int, vocab_size: int) -> int:
    """The target's choice after content with this hash."""
    mixed = (state ^ (seed * 0x9E3779B97F4A7C15)) & _MASK
    mixed = ((mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9) & _MASK
    return (mixed >> 33) % vocab_size


def perfect_world(request: Request, vocab_size: int) -> tuple[tuple[int, ...], FinishReason]:
    """All new tokens of a request, carried ones included, and why it ends, if nobody ends it."""
    reason = finished_before_start(request)
    if reason is not None:
        return request.committed, reason
    state = fold(0, request.prompt + request.committed)
    tokens = list(request.committed)
    while True:
        token = next_token(state, request.sampling.seed, vocab_size)
        state = fold(state, (token,))
        left = request.max_new_tokens - len(tokens)
        tokens.append(token)
        _, reason = truncate((token,), left, request.stop_token_ids)
        if reason is not None:
            return tuple(tokens), reason


@dataclass(slots=True)
class _Row:
    """A resident as the replica sees it."""

    length: int
    state: int
    tokens_left: int
    seed: int
    stop_token_ids: tuple[int, ...]
    blocks: int
    """Blocks that it owns."""
    to_fill: int = 0
    """KV positions that its prefill has not filled yet."""


class FakeReplica:
    """One incarnation; batches are received in sequence and run one at a time."""

    def __init__(self, replica_id: str, spec: ReplicaSpec, acceptance: float, rng: Random) -> None:
        """Each draft token is accepted with probability `acceptance`, if those before it are."""
        self.id = replica_id
        self.spec = spec
        self.acceptance = acceptance
        self._rng = rng
        self._residents: dict[str, _Row] = {}
        self._prefixes = PrefixSet(spec.kv_blocks if spec.prefix_sharing else 0)
        self._held: set[str] = set()
        self._unfilled: set[str] = set()
        self._batch_id_last = 0

    @property
    def residents(self) -> int:
        return len(self._residents)

    def receive(self, batch: Batch) -> None:
        """Takes a batch into the queue and holds its rows."""
        assert batch.replica_id == self.id, "a batch for another replica"
        assert batch.id > self._batch_id_last, "batch ids do not rise"
        assert batch.steps >= 1, "a batch without steps"
        self._batch_id_last = batch.id
        prefill = batch.kind is BatchKind.PREFILL
        assert bool(batch.prefill) == prefill, "prefill rows and kind differ"
        assert bool(batch.rows) != prefill, "step rows and kind differ"
        rows = len(batch.rows)
        assert rows <= (self.spec.rows_max or rows), "more rows than its memory lasts for"
        for prefill_row in batch.prefill:
            resident = self._residents.get(prefill_row.sequence_id)
            assert bool(prefill_row.tokens) == (resident is None), "prefill of a resident"
            if resident is not None:
                assert resident.to_fill > 0, "prefill of what is filled"
            self._hold(prefill_row.sequence_id)
        lengths = [row.length for row in batch.rows]
        assert lengths == sorted(lengths), "rows do not rise by length"
        for row in batch.rows:
            assert row.sequence_id in self._residents, "a step for a sequence not resident"
            assert 0 <= row.draft_len <= batch.draft_len, "a row's k exceeds its batch's"
            self._hold(row.sequence_id)

    def _hold(self, sequence_id: str) -> None:
        assert sequence_id not in self._held, "a row in two batches at once"
        self._held.add(sequence_id)

    def end(self, batch: Batch) -> None:
        """The batch is over, run or failed: it holds its rows no longer."""
        for row in batch.prefill or batch.rows:
            self._held.remove(row.sequence_id)

    def release(self, action: Release) -> None:
        for sequence_id in action.sequence_ids:
            assert sequence_id not in self._held, "release of a row that a batch holds"
            if sequence_id in self._unfilled:
                self._unfilled.remove(sequence_id)
            else:
                del self._residents[sequence_id]

    def fail(self, batch: Batch) -> None:
        """The batch could not be run; its rows are as they were before, those of a prefill gone."""
        for row in batch.prefill:
            self._residents.pop(row.sequence_id, None)
            self._unfilled.add(row.sequence_id)

    def run(self, batch: Batch, step_s: float) -> StepResult:
        """Runs a received batch, which holds its rows until `end`.

        Reports as its time `step_s` for each of its steps, or once for a prefill.
        """
        run = self.begin(batch)
        while run.advance():
            pass
        return run.result(step_s)

    def begin(self, batch: Batch) -> Run:
        """The same step by step, for whoever may interrupt it."""
        reused = {row.sequence_id: self._fill(row) for row in batch.prefill}
        for row in batch.rows:
            resident = self._residents[row.sequence_id]
            assert row.length == resident.length, "the pool's length differs from the replica's"
            assert resident.to_fill == 0, "a step for a row that is not filled"
            most = min(batch.steps * (row.draft_len + 1), resident.tokens_left)
            self._own(resident, row.blocks, row.length + most - 1)
        rows = [self._residents[row.sequence_id] for row in batch.rows]
        return Run(batch, rows, self.acceptance, self._rng, self.spec.vocab_size, reused)

    def _fill(self, row: PrefillRow) -> int:
        """Returns how many positions it had before."""
        resident = self._residents.get(row.sequence_id)
        reused = 0
        if resident is None:
            resident = self._admit(row)
            keys = block_keys(row.tokens, self.spec.block_size, row.salt)
            reused = self._prefixes.shared(keys) * self.spec.block_size
            resident.to_fill -= reused
            self._prefixes.add(keys)
        else:
            assert row.begin == resident.length - 1 - resident.to_fill, "chunks do not meet"
        until = resident.length - 1 if row.until is None else row.until
        assert row.begin <= until < resident.length, "a chunk beyond the content"
        resident.to_fill = min(resident.to_fill, resident.length - 1 - until)
        return reused

    def _admit(self, row: PrefillRow) -> _Row:
        assert row.tokens_left >= 1, "a complete sequence was prefilled"
        assert len(row.tokens) + row.tokens_left <= self.spec.context_len, "beyond the context"
        state = fold(0, row.tokens)
        seed, stops = row.sampling.seed, row.stop_token_ids
        length = len(row.tokens)
        resident = _Row(length, state, row.tokens_left, seed, stops, 0, length - 1)
        self._residents[row.sequence_id] = resident
        self._own(resident, row.blocks, length)
        return resident

    def _own(self, resident: _Row, blocks: int, positions: int) -> None:
        assert blocks_needed(positions, self.spec.block_size) <= blocks, "too few blocks"
        resident.blocks = max(resident.blocks, blocks)
        used = sum(one.blocks for one in self._residents.values())
        assert used <= self.spec.kv_blocks, "out of KV blocks"


class Run:
    """One batch under way: `advance` does a step and says whether there is another."""

    def __init__(
        self,
        batch: Batch,
        rows: list[_Row],
        acceptance: float,
        rng: Random,
        vocab_size: int,
        reused: dict[str, int],
    ) -> None:
        self._batch = batch
        self._reused = reused
        self._rows = rows
        self._acceptance = acceptance
        self._rng = rng
        self._vocab_size = vocab_size
        self._tokens: list[list[int]] = [[] for _ in rows]
        self._drafted = [0] * len(rows)
        self._accepted_at = [[0] * batch.draft_len for _ in rows]
        self._tried_at = [[0] * batch.draft_len for _ in rows]
        self._steps = self._own = self._read = 0

    def advance(self) -> bool:
        """A prefill is one step. Call it once more only if it says so."""
        self._steps += 1
        if not self._rows:
            return False
        finished = False
        widths = []
        draft_lens = [
            min(row.draft_len, resident.tokens_left - 1)
            for row, resident in zip(self._batch.rows, self._rows, strict=True)
        ]
        if self._batch.verify_tokens == 0:
            draft_lens = [0] * len(draft_lens)
        checked = spread(draft_lens, self._batch.verify_tokens)
        for index, resident in enumerate(self._rows):
            draft_len = draft_lens[index]
            widths.append(resident.length + draft_len)
            self._drafted[index] += draft_len
            accepted = 0
            while accepted < checked[index]:
                self._tried_at[index][accepted] += 1
                if self._rng.random() >= self._acceptance:
                    break
                self._accepted_at[index][accepted] += 1
                accepted += 1
            new = self._commit(resident, accepted + 1)
            self._tokens[index].extend(new)
            left = resident.tokens_left + len(new)
            _, reason = truncate(tuple(new), left, resident.stop_token_ids)
            finished = finished or reason is not None
        self._own += sum(widths)
        self._read += max(widths) * len(widths)
        return self._steps < self._batch.steps and not finished

    def result(self, step_s: float) -> StepResult:
        """What was committed so far."""
        batch = self._batch
        times = StepTimes(total_s=step_s * self._steps)
        if not self._rows:
            filled = tuple(
                RowResult(row.sequence_id, reused=self._reused[row.sequence_id])
                for row in batch.prefill
            )
            times = StepTimes(prefill_s=times.total_s, total_s=times.total_s)
            return StepResult(batch.id, batch.replica_id, filled, times=times)
        rows = tuple(
            RowResult(
                row.sequence_id,
                tuple(self._tokens[index]),
                self._steps,
                self._drafted[index],
                tuple(self._accepted_at[index]),
                tuple(self._tried_at[index]),
            )
            for index, row in enumerate(batch.rows)
        )
        return StepResult(
            batch.id, batch.replica_id, rows, self._steps, times, self._own, self._read
        )

    def _commit(self, resident: _Row, count: int) -> list[int]:
        new = []
        for _ in range(count):
            token = next_token(resident.state, resident.seed, self._vocab_size)
            resident.state = fold(resident.state, (token,))
            new.append(token)
        resident.length += count
        resident.tokens_left -= count
        return new


def spread(draft_lens: Sequence[int], verify_tokens: int | None) -> list[int]:
    """How many draft tokens of each row are checked where a batch lets `verify_tokens` through.

    A fake draft believes in all rows alike, so the first token of every row comes before any
    second one.
    """
    if verify_tokens is None:
        return list(draft_lens)
    checked = [0] * len(draft_lens)
    left = min(verify_tokens, sum(draft_lens))
    while left > 0:
        for index, draft_len in enumerate(draft_lens):
            if left > 0 and checked[index] < draft_len:
                checked[index] += 1
                left -= 1
    return checked
