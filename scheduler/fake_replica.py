"""A replica without a model: it obeys orders as a real one does and asserts what a real one would.

Its target is the *perfect world*, a hash of all content so far: one wrong, missing or doubled token
anywhere changes every token after it. Which draft tokens are accepted is drawn from a generator
that is passed in, so the draft changes how many tokens a step commits and never which.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from scheduler.admission import blocks_needed
from scheduler.messages import (
    FinishReason,
    Order,
    OrderKind,
    PrefillRow,
    Release,
    ReplicaSpec,
    Request,
    RowResult,
    StepResult,
    StepTimes,
)
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
    """Blocks that it may come to need."""


class FakeReplica:
    """One incarnation; orders are received in sequence and run one at a time."""

    def __init__(self, replica_id: str, spec: ReplicaSpec, acceptance: float, rng: Random) -> None:
        """Each draft token is accepted with probability `acceptance`, if those before it are."""
        self.id = replica_id
        self.spec = spec
        self.acceptance = acceptance
        self._rng = rng
        self._residents: dict[str, _Row] = {}
        self._held: set[str] = set()
        self._unfilled: set[str] = set()
        self._order_id_last = 0

    @property
    def residents(self) -> int:
        return len(self._residents)

    def receive(self, order: Order) -> None:
        """Takes an order into the queue and holds its rows."""
        assert order.replica_id == self.id, "an order for another replica"
        assert order.id > self._order_id_last, "order ids do not rise"
        assert order.steps >= 1, "an order without steps"
        self._order_id_last = order.id
        prefill = order.kind is OrderKind.PREFILL
        assert bool(order.prefill) == prefill, "prefill rows and kind differ"
        assert bool(order.rows) != prefill, "step rows and kind differ"
        for prefill_row in order.prefill:
            assert prefill_row.sequence_id not in self._residents, "prefill of a resident"
            self._hold(prefill_row.sequence_id)
        lengths = [row.length for row in order.rows]
        assert lengths == sorted(lengths), "rows do not rise by length"
        for row in order.rows:
            assert row.sequence_id in self._residents, "a step for a sequence not resident"
            assert 0 <= row.draft_len <= order.draft_len, "a row's k exceeds its order's"
            self._hold(row.sequence_id)

    def _hold(self, sequence_id: str) -> None:
        assert sequence_id not in self._held, "a row in two orders at once"
        self._held.add(sequence_id)

    def end(self, order: Order) -> None:
        """The order is over, run or failed: it holds its rows no longer."""
        for row in order.prefill or order.rows:
            self._held.remove(row.sequence_id)

    def release(self, action: Release) -> None:
        for sequence_id in action.sequence_ids:
            assert sequence_id not in self._held, "release of a row that an order holds"
            if sequence_id in self._unfilled:
                self._unfilled.remove(sequence_id)
            else:
                del self._residents[sequence_id]

    def fail(self, order: Order) -> None:
        """The order could not be run; its rows are as they were before."""
        self._unfilled.update(row.sequence_id for row in order.prefill)

    def run(self, order: Order, step_s: float) -> StepResult:
        """Runs a received order, which holds its rows until `end`.

        Reports as its time `step_s` for each of its steps, or once for a prefill.
        """
        if order.kind is OrderKind.PREFILL:
            rows = tuple(self._fill(row) for row in order.prefill)
            return StepResult(order.id, self.id, rows, times=StepTimes(step_s, total_s=step_s))
        return self._steps(order, step_s)

    def _fill(self, row: PrefillRow) -> RowResult:
        assert row.tokens_left >= 1, "a complete sequence was prefilled"
        length_max = len(row.tokens) + row.tokens_left
        assert length_max <= self.spec.context_len, "longer than the context"
        blocks = blocks_needed(length_max, self.spec.block_size)
        used = sum(resident.blocks for resident in self._residents.values())
        assert used + blocks <= self.spec.kv_blocks, "out of KV blocks"
        self._residents[row.sequence_id] = _Row(
            len(row.tokens),
            fold(0, row.tokens),
            row.tokens_left,
            row.sampling.seed,
            row.stop_token_ids,
            blocks,
        )
        return RowResult(row.sequence_id)

    def _steps(self, order: Order, step_s: float) -> StepResult:
        rows = [(row, self._residents[row.sequence_id]) for row in order.rows]
        tokens: list[list[int]] = [[] for _ in rows]
        drafted = [0] * len(rows)
        accepted_at = [[0] * order.draft_len for _ in rows]
        steps = own = read = 0
        finished = False
        for row, resident in rows:
            assert row.length == resident.length, "the pool's length differs from the replica's"
        while steps < order.steps and not finished:
            steps += 1
            widths = []
            for index, (row, resident) in enumerate(rows):
                draft_len = min(row.draft_len, resident.tokens_left - 1)
                widths.append(resident.length + draft_len)
                drafted[index] += draft_len
                accepted = 0
                while accepted < draft_len and self._rng.random() < self.acceptance:
                    accepted_at[index][accepted] += 1
                    accepted += 1
                new = self._commit(resident, accepted + 1)
                tokens[index].extend(new)
                _, reason = truncate(
                    tuple(new), resident.tokens_left + len(new), resident.stop_token_ids
                )
                finished = finished or reason is not None
            own += sum(widths)
            read += max(widths) * len(widths)
        results = tuple(
            RowResult(
                row.sequence_id,
                tuple(tokens[index]),
                steps,
                drafted[index],
                tuple(accepted_at[index]),
            )
            for index, (row, _) in enumerate(rows)
        )
        times = StepTimes(total_s=step_s * steps)
        return StepResult(order.id, self.id, results, steps, times, own, read)

    def _commit(self, resident: _Row, count: int) -> list[int]:
        new = []
        for _ in range(count):
            token = next_token(resident.state, resident.seed, self.spec.vocab_size)
            resident.state = fold(resident.state, (token,))
            new.append(token)
        resident.length += count
        resident.tokens_left -= count
        return new
