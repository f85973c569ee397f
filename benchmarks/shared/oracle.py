"""A drafter that knows the true continuation, and tells it as often as it is told to: for tests,
and to see what a drafter of some acceptance and some cost would gain."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from replicas.calibration import calibrated
from replicas.config import ReplicaConfig
from replicas.drafters import Drafter, DraftRequest, Observation, Proposal
from replicas.memory import plan_memory
from replicas.pair import load_pair
from replicas.replica import Replica
from replicas.stopwatch import Stopwatch


class OracleDrafter:
    """Proposes each next token rightly with the given probability, in drafts of ragged lengths.

    With a `worker` it costs what that drafter costs, whose drafts are thrown away.
    """

    name = "oracle"

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],  # whole ones: prompt and continuation
        probability: float,
        vocab: int,
        ragged: bool = True,
        worker: Drafter | None = None,
    ) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self.learn(sequences)
        self._probability = probability
        self._vocab = vocab
        self._ragged = ragged
        self._rng = random.Random(0)
        self.rows: dict[str, int] = {}
        """Valid positions of each row, as it was told."""
        self._worker = worker
        self.aux_layers: tuple[int, ...] = () if worker is None else worker.aux_layers

    def learn(self, sequences: Sequence[Sequence[int]]) -> None:
        """Whole ones, prompt and continuation."""
        for sequence in sequences:
            for end in range(1, len(sequence)):
                self._next[tuple(sequence[:end])] = sequence[end]

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None:
        assert row not in self.rows, "a row's life begins once"
        self.rows[row] = prefilled
        if self._worker is not None:
            self._worker.begin(row, tokens, salt, prefilled)

    def end(self, row: str) -> None:
        self.rows.pop(row, None)
        if self._worker is not None:
            self._worker.end(row)

    def observe(self, observed: Observation) -> None:
        for row, (begin, end) in zip(observed.ids, observed.ranges, strict=True):
            assert self.rows[row] == begin, "what is seen follows on what was seen before"
            self.rows[row] = end
        if self._worker is not None:
            self._worker.observe(observed)

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        if self._worker is not None:
            self._worker.propose(request, watch)
        lens = [self._rng.randint(0, most) if self._ragged else most for most in request.draft_lens]
        drafts = [
            self._draft(list(content), most)
            for content, most in zip(request.contents, request.draft_lens, strict=True)
        ]
        k = request.k
        padded = [draft + [0] * (k - len(draft)) for draft in drafts]
        tokens = torch.tensor(padded, device=request.table.device).t().contiguous()
        return Proposal(tokens, lens)

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
        if self._worker is not None:
            self._worker.rollback(rows, lengths)

    def valid(self, row: str) -> int | None:
        return None if self._worker is None else self._worker.valid(row)


def oracle_replica(config: ReplicaConfig, probability: float) -> tuple[Replica, OracleDrafter]:
    """A replica whose drafter costs what that of `config` does; the oracle is to learn yet."""
    pair = load_pair(config)
    plan = plan_memory(config, pair.shape, pair.device, loaded=True)
    worker = pair.drafter(config, plan)
    assert worker is not None, "a drafter whose cost counts"
    oracle = OracleDrafter([], probability, pair.vocab_size, ragged=False, worker=worker)
    replica = Replica(pair, config, plan, oracle)
    replica.spec = calibrated(replica, *replica.planned, replica.aux_layers)
    return replica, oracle
