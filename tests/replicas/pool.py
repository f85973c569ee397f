"""Plays the pool to a replica by hand: for tests of what replicas keep from batch to batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from replicas.replica import Replica
from scheduler.messages import (
    Batch,
    BatchKind,
    PrefillRow,
    RowFailure,
    Sampling,
    StepResult,
    StepRow,
)
from tests.reference import plain_greedy
from tests.tiny_pairs import VOCAB, target_model

NEW = 20


class Client:
    """Keeps contents, numbers batches."""

    def __init__(self, replica: Replica, stop: tuple[int, ...] = ()) -> None:
        self.replica = replica
        self.contents: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.filled: dict[str, int] = {}
        self.failures: dict[str, RowFailure] = {}
        self._stop = stop
        self._batches = 0

    def prefill(self, new: int = NEW, salt: str = "", **prompts: list[int]) -> StepResult:
        rows = tuple(
            PrefillRow(
                name,
                tuple(tokens),
                new,
                Sampling(),
                self._stop,
                self._blocks(name, tokens, new),
                salt=salt,
            )
            for name, tokens in prompts.items()
        )
        self.contents.update({name: list(tokens) for name, tokens in prompts.items()})
        self.prompts.update({name: len(tokens) for name, tokens in prompts.items()})
        return self._prefill(rows)

    def prefill_until(self, new: int = NEW, **untils: int) -> StepResult:
        """Fill each of `contents` up to this position, from where it stands."""
        rows = []
        for name, until in untils.items():
            tokens = self.contents[name]
            begin = self.filled.get(name, 0)
            blocks = self._blocks(name, tokens, new)
            sent = () if begin else tuple(tokens)
            rows.append(PrefillRow(name, sent, new, Sampling(), (), blocks, begin, until))
        result = self._prefill(tuple(rows))
        self.filled.update(untils)
        return result

    def _prefill(self, rows: tuple[PrefillRow, ...]) -> StepResult:
        self._batches += 1
        result = self.replica.step(Batch(self._batches, "r", BatchKind.PREFILL, prefill=rows))
        if isinstance(self.replica, Replica):
            self.replica.check_integrity()
        return result

    def steps(self, k: int, n: int = 1, names: list[str] | None = None, **own: int) -> StepResult:
        """`own`: draft lengths of rows that differ from k, the most of all."""
        rows = tuple(
            StepRow(name, len(self.contents[name]), own.get(name, k), self.blocks[name])
            for name in names or list(self.contents)
        )
        self._batches += 1
        batch = Batch(self._batches, "r", BatchKind.SPECULATE, rows=rows, draft_len=k, steps=n)
        result = self.replica.step(batch)
        for row in result.rows:
            self.contents[row.sequence_id].extend(row.tokens)
            if row.failure is not None:
                self.failures[row.sequence_id] = row.failure
        if isinstance(self.replica, Replica):
            self.replica.check_integrity()
        return result

    def _blocks(self, name: str, tokens: list[int], new: int) -> int:
        self.blocks[name] = -(-(len(tokens) + new) // self.replica.spec.block_size)
        return self.blocks[name]

    def new_tokens(self, name: str) -> list[int]:
        return self.contents[name][self.prompts[name] :]

    def check(self, architecture: str = "llama") -> None:
        """Each row has committed something, all of which transformers' `generate` says, too."""
        model = target_model(architecture)
        for name, content in self.contents.items():
            new = self.new_tokens(name)
            assert new
            assert new == plain_greedy(model, content[: self.prompts[name]], len(new)), name


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(VOCAB) for _ in range(length)]


@contextmanager
def failing_pass(replica: Replica, number: int) -> Iterator[None]:
    """The target's pass of this number within fails, if it comes to that."""
    forward, passes = replica.target.forward, count(1)

    def failing(*args: object) -> object:
        if next(passes) == number:
            raise RuntimeError("out of memory")
        return forward(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica.target, "forward", failing)
        yield


class Failing:
    """A replica of which this share of batches of steps fails somewhere, and then runs again."""

    def __init__(self, replica: Replica, share: float) -> None:
        self.spec = replica.spec
        self.release = replica.release
        self.draft_ahead = replica.draft_ahead
        self._replica = replica
        self._share = share
        self._rng = random.Random(4)
        self.failed = 0

    def step(self, batch: Batch) -> StepResult:
        if batch.kind is BatchKind.SPECULATE and self._rng.random() < self._share:
            try:
                with failing_pass(self._replica, 1 + self._rng.randrange(batch.steps)):
                    return self._replica.step(batch)
            except RuntimeError:
                self.failed += 1
                self._replica.check_integrity()
        return self._replica.step(batch)
