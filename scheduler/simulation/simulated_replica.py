"""A replica without a model: it runs batches as a real one does and asserts what a real one would.

It commits the tokens of `reference_output`. How many draft tokens are accepted is drawn at random:
that changes how many tokens a step commits, never which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

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
    StepRow,
    StepTimes,
)
from scheduler.simulation.hardware import Times
from scheduler.state import PrefixSet, block_keys
from scheduler.validation import blocks_needed

AcceptanceRate = Callable[[str], float]
"""By request: the probability that a draft token is accepted if those before it are."""


@dataclass(slots=True)
class Resident:
    """A sequence on a simulated replica."""

    admitted: PrefillRow
    acceptance: float
    state: int
    """Hash of its content."""
    length: int
    """Tokens of its content."""
    to_prefill: int
    """KV positions that its prefill has not filled yet."""
    tokens_left: int
    blocks: int = 0
    """It has room for the tokens of so many blocks."""
    held: bool = False
    """Whether a batch holds it."""
    reused: int = 0
    """KV positions that its first chunk found filled. What follows is of the batch that runs."""
    new: list[int] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    tried_at: list[int] = field(default_factory=list)

    def begin(self, draft_len: int) -> None:
        self.new, self.draft_tokens = [], 0
        self.accepted_at, self.tried_at = [0] * draft_len, [0] * draft_len

    def step(self, draft_len: int, rng: Random, vocab_size: int) -> bool:
        """Commits the accepted tokens and one more. Returns whether the sequence has finished."""
        accepted = 0
        while accepted < draft_len and rng.random() < self.acceptance:
            accepted += 1
        self.draft_tokens += draft_len
        for position in range(min(accepted + 1, draft_len)):
            self.tried_at[position] += 1
            self.accepted_at[position] += position < accepted
        self.length += accepted + 1
        self.tokens_left -= accepted + 1
        stopped = False
        for _ in range(accepted + 1):
            token = next_token(self.state, self.admitted.sampling.seed, vocab_size)
            self.state = content_hash((token,), self.state)
            self.new.append(token)
            stopped = stopped or token in self.admitted.stop_token_ids
        return stopped or self.tokens_left == 0

    def result(self, steps: int) -> RowResult:
        """What it committed in these steps."""
        return RowResult(
            self.admitted.sequence_id,
            tuple(self.new),
            steps,
            self.draft_tokens,
            tuple(self.accepted_at),
            tuple(self.tried_at),
            asked_tokens=self.draft_tokens,
        )


class SimulatedReplica:
    """One incarnation; batches are received in order and run one at a time, step by step."""

    def __init__(
        self,
        replica_id: str,
        spec: ReplicaSpec,
        times: Times,
        acceptance: AcceptanceRate,
        rng: Random,
    ) -> None:
        self.id = replica_id
        self.spec = spec
        self.residents: dict[str, Resident] = {}
        self._times = times
        self._acceptance = acceptance
        self._rng = rng
        self._prefixes = PrefixSet(spec.texts_kept)
        self._blocks_used = 0
        self._failed: set[str] = set()
        """Sequences whose prefill failed and which the pool has not released yet."""
        self._batch_id_last = 0
        self._drafted_s: dict[int, float] = {}
        """When the first draft of each batch received is done, where it overlaps."""
        self._drafter_free_s = 0.0
        # The batch that runs.
        self._batch: Batch | None = None
        self._step_times = StepTimes()
        self._rows: list[Resident] = []
        self._steps = 0
        self._hidden_s = 0.0

    def receive(self, batch: Batch, now_s: float = 0.0) -> None:
        """Takes a batch into the queue; it holds its rows until `end`. Where it overlaps, it drafts
        from now on, one batch after the other."""
        assert batch.replica_id == self.id, "a batch for another replica"
        assert batch.id > self._batch_id_last, "batch ids do not rise"
        assert batch.steps >= 1, "a batch without steps"
        self._batch_id_last = batch.id
        prefill = batch.kind is BatchKind.PREFILL
        assert bool(batch.prefill) == prefill, "prefill rows and kind differ"
        assert bool(batch.rows) != prefill, "step rows and kind differ"
        rows = len(batch.rows)
        assert rows <= (self.spec.rows_max or rows), "more rows than its memory lasts for"
        lengths = [row.length for row in batch.rows]
        assert lengths == sorted(lengths), "rows do not rise by length"
        for row in batch.prefill:
            self._receive_prefill(row)
        for step_row in batch.rows:
            self._receive_step(batch, step_row)
        for sequence_id in batch.row_ids:
            resident = self.residents[sequence_id]
            assert not resident.held, "a row in two batches at once"
            resident.held = True
        if self.spec.overlaps and batch.draft_len:
            begin_s = max(now_s, self._drafter_free_s)
            self._drafter_free_s = begin_s + self._times(batch).draft_s
            self._drafted_s[batch.id] = self._drafter_free_s

    def _receive_prefill(self, row: PrefillRow) -> None:
        resident = self.residents.get(row.sequence_id)
        assert bool(row.tokens) == (resident is None), "content comes with the first chunk alone"
        if resident is None:
            length = len(row.tokens)
            assert row.tokens_left >= 1, "a complete sequence was prefilled"
            assert length + row.tokens_left <= self.spec.context_len, "beyond the context"
            acceptance = self._acceptance(row.sequence_id)
            resident = Resident(
                row, acceptance, content_hash(row.tokens), length, length - 1, row.tokens_left
            )
            self.residents[row.sequence_id] = resident
            self._own(resident, row.blocks, length)
        else:
            assert resident.to_prefill > 0, "prefill of what is filled"
        assert row.begin == resident.length - 1 - resident.to_prefill, "chunks do not meet"
        assert row.begin <= row.end < resident.length, "a chunk beyond the content"

    def _receive_step(self, batch: Batch, row: StepRow) -> None:
        assert row.sequence_id in self.residents, "a step for a sequence not resident"
        resident = self.residents[row.sequence_id]
        assert resident.to_prefill == 0, "a step for a row that is not filled"
        assert row.length == resident.length, "the pool's length differs from the replica's"
        assert 0 <= row.draft_len <= batch.draft_len, "a row's k exceeds its batch's"
        new = min(batch.steps * (row.draft_len + 1), resident.tokens_left)
        self._own(resident, row.blocks, row.length + new - 1)

    def _own(self, resident: Resident, blocks: int, positions: int) -> None:
        assert blocks_needed(positions, self.spec.block_size) <= blocks, "too few blocks"
        taken, blocks = self.spec.blocks_taken, max(blocks, resident.blocks)
        self._blocks_used += taken(blocks) - taken(resident.blocks)
        resident.blocks = blocks
        assert self._blocks_used <= self.spec.kv_blocks, "out of KV blocks"

    def begin(self, batch: Batch, now_s: float = 0.0) -> float:
        """Starts a received batch; returns the seconds of its first step, or of all of a prefill.
        Further steps take `step_s`."""
        self._batch = batch
        self._step_times = self._times(batch)
        self._rows = [self.residents[row.sequence_id] for row in batch.prefill or batch.rows]
        self._steps = 0
        for resident in self._rows:
            resident.begin(batch.draft_len)
        for row in batch.prefill:
            self._fill(row, self.residents[row.sequence_id])
        self._hidden_s = 0.0
        drafted_s = self._drafted_s.pop(batch.id, None)
        if drafted_s is not None:
            self._hidden_s = self._step_times.draft_s - max(drafted_s - now_s, 0.0)
        return self.step_s - self._hidden_s

    @property
    def step_s(self) -> float:
        """Seconds of a step of the batch that runs which is drafted in it."""
        return self._step_times.total_s

    def _fill(self, row: PrefillRow, resident: Resident) -> None:
        resident.reused = 0
        if row.tokens and self.spec.prefix_sharing:
            keys = block_keys(row.tokens, self.spec.block_size, row.salt)
            resident.reused = self._prefixes.shared(keys) * self.spec.block_size
            self._prefixes.add(keys)
        filled = resident.length - 1 - row.end
        resident.to_prefill = min(resident.to_prefill - resident.reused, filled)

    def advance(self) -> bool:
        """Does one step; returns whether another follows. A prefill is one step."""
        batch, residents = self._batch, self._rows
        assert batch is not None, "no batch runs"
        self._steps += 1
        if batch.prefill:
            return False
        finished = [
            resident.step(
                min(row.draft_len, resident.tokens_left - 1), self._rng, self.spec.vocab_size
            )
            for row, resident in zip(batch.rows, residents, strict=True)
        ]
        return self._steps < batch.steps and not any(finished)

    def end(self) -> StepResult:
        """The batch is over and holds its rows no longer; returns what was committed."""
        batch, times, steps = self._batch, self._step_times, self._steps
        assert batch is not None, "no batch runs"
        self._batch = None
        self._let_go(batch)
        if batch.prefill:
            done = zip(batch.prefill, self._rows, strict=True)
            rows = tuple(RowResult(row.sequence_id, reused=own.reused) for row, own in done)
            return StepResult(batch.id, self.id, rows, times=times)
        whole = StepTimes(
            draft_s=times.draft_s * steps,
            verify_s=times.verify_s * steps,
            total_s=times.total_s * steps - self._hidden_s,
            hidden_s=self._hidden_s,
        )
        rows = tuple([resident.result(steps) for resident in self._rows])
        return StepResult(batch.id, self.id, rows, steps, whole)

    def fail(self, batch: Batch) -> None:
        """The batch could not be run: rows of a prefill are gone, others are as before."""
        self._let_go(batch)
        self._drafted_s.pop(batch.id, None)
        for row in batch.prefill:
            self._remove(row.sequence_id)
            self._failed.add(row.sequence_id)

    def _let_go(self, batch: Batch) -> None:
        for row in batch.prefill or batch.rows:
            self.residents[row.sequence_id].held = False

    def release(self, action: Release) -> None:
        for sequence_id in action.sequence_ids:
            if sequence_id in self._failed:
                self._failed.remove(sequence_id)
            else:
                assert not self.residents[sequence_id].held, "release of a row that a batch holds"
                self._remove(sequence_id)

    def _remove(self, sequence_id: str) -> None:
        self._blocks_used -= self.spec.blocks_taken(self.residents.pop(sequence_id).blocks)


def reference_output(request: Request, vocab_size: int) -> tuple[tuple[int, ...], FinishReason]:
    """All new tokens of a request, carried ones included, and why it ends if nothing else ends it.

    It depends on the content and the seed alone. The next token is a hash of all content so far, so
    one wrong, missing or doubled token changes nearly every token after it.
    """
    tokens = list(request.committed)
    state = content_hash(request.prompt + request.committed)
    while not (tokens and tokens[-1] in request.stop_token_ids):
        if len(tokens) >= request.max_new_tokens:
            return tuple(tokens), FinishReason.LENGTH
        tokens.append(next_token(state, request.sampling.seed, vocab_size))
        state = content_hash(tokens[-1:], state)
    return tuple(tokens), FinishReason.STOP


def content_hash(tokens: Iterable[int], state: int = 0) -> int:
    for token in tokens:
        state = hash((state, token))
    return state


def next_token(state: int, seed: int, vocab_size: int) -> int:
    """The target's choice after a content with this hash."""
    return (state ^ seed) % vocab_size
