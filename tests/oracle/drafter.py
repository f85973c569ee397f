"""A drafter that knows the true continuation, and tells it as often as it is told to."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from replicas.drafters import Ask, Proposal, Seen
from replicas.stopwatch import Stopwatch


class OracleDrafter:
    """Proposes each next token rightly with the given probability, in drafts of ragged lengths."""

    name = "oracle"
    taps: tuple[int, ...] = ()
    rates = True

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],  # whole ones: prompt and continuation
        probability: float,
        vocab: int,
        ragged: bool = True,
        seed: int = 0,
    ) -> None:
        self._next = {
            tuple(sequence[:end]): sequence[end]
            for sequence in sequences
            for end in range(1, len(sequence))
        }
        self._probability = probability
        self._vocab = vocab
        self._ragged = ragged
        self._rng = random.Random(seed)
        self.rows: dict[str, int] = {}
        """Valid positions of each row, as it was told."""

    def begin(self, row: str, tokens: Sequence[int], salt: str, filled: int) -> None:
        assert row not in self.rows, "a row's life begins once"
        self.rows[row] = filled

    def end(self, row: str) -> None:
        self.rows.pop(row, None)

    def observe(self, seen: Seen) -> None:
        for row, (begin, end) in zip(seen.ids, seen.ranges, strict=True):
            assert self.rows[row] == begin, "what is seen follows on what was seen before"
            self.rows[row] = end

    def propose(self, ask: Ask, watch: Stopwatch) -> Proposal:
        lens = [self._rng.randint(0, most) if self._ragged else most for most in ask.draft_lens]
        drafts = [
            self._draft(list(content), most)
            for content, most in zip(ask.contents, ask.draft_lens, strict=True)
        ]
        k = ask.k
        padded = [draft + [0] * (k - len(draft)) for draft in drafts]
        rated = torch.rand((len(drafts), k)).log().cumsum(1) if ask.rate else None
        return Proposal(torch.tensor(padded).t().contiguous(), lens, rated)

    def _draft(self, content: list[int], most: int) -> list[int]:
        draft: list[int] = []
        for _ in range(most):
            right = self._next.get((*content, *draft))
            if right is None or self._rng.random() >= self._probability:
                wrong = self._rng.randrange(self._vocab - 1)
                draft.append(wrong + (right is not None and wrong >= right))
            else:
                draft.append(right)
        return draft

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self.rows[row] = length - 1

    def valid(self, row: str) -> int | None:
        return None
