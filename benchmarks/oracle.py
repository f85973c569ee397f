"""A drafter that knows the true continuation, and tells it as often as it is told to: for tests,
and to see what a drafter of some acceptance and some cost would gain."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from replicas.calibration import calibrated
from replicas.config import ReplicaConfig
from replicas.drafters import Ask, Drafter, Proposal, Seen
from replicas.drafters.load import load_drafter
from replicas.memory import pair_shape, plan_memory
from replicas.models.pair import load_pair
from replicas.replica import Replica
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
        self._next: dict[tuple[int, ...], int] = {}
        self.learn(sequences)
        self._probability = probability
        self._vocab = vocab
        self._ragged = ragged
        self._rng = random.Random(seed)
        self.rows: dict[str, int] = {}
        """Valid positions of each row, as it was told."""

    def learn(self, sequences: Sequence[Sequence[int]]) -> None:
        """Whole ones, prompt and continuation."""
        for sequence in sequences:
            for end in range(1, len(sequence)):
                self._next[tuple(sequence[:end])] = sequence[end]

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


class CostlyOracle:
    """Proposes an oracle's tokens after another drafter has done its work for nothing."""

    def __init__(self, oracle: OracleDrafter, worker: Drafter) -> None:
        self.oracle = oracle
        self._worker = worker
        self.name, self.taps, self.rates = "oracle", worker.taps, False

    def begin(self, row: str, tokens: Sequence[int], salt: str, filled: int) -> None:
        self.oracle.begin(row, tokens, salt, filled)
        self._worker.begin(row, tokens, salt, filled)

    def end(self, row: str) -> None:
        self.oracle.end(row)
        self._worker.end(row)

    def observe(self, seen: Seen) -> None:
        self.oracle.observe(seen)
        self._worker.observe(seen)

    def propose(self, ask: Ask, watch: Stopwatch) -> Proposal:
        self._worker.propose(ask, watch)
        with watch.section("oracle"):
            return self.oracle.propose(ask, watch)

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        self.oracle.rollback(rows, lengths)
        self._worker.rollback(rows, lengths)

    def valid(self, row: str) -> int | None:
        return self._worker.valid(row)


def oracle_replica(config: ReplicaConfig, probability: float) -> tuple[Replica, OracleDrafter]:
    """A replica whose drafter costs what that of `config` does; the oracle is to learn yet."""
    pair = load_pair(config)
    plan = plan_memory(config, pair_shape(pair), pair.device, loaded=True)
    worker = load_drafter(pair, config, plan)
    assert worker is not None, "a drafter whose cost counts"
    oracle = OracleDrafter([], probability, pair.vocab_size, ragged=False)
    replica = Replica(pair, config, plan, CostlyOracle(oracle, worker))
    replica.spec = calibrated(replica, *replica.planned)
    return replica, oracle
