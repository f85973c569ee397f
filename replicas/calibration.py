"""A few trials when a replica has loaded: what the pool knows of its speed at first.

They are real batches on sequences of a phrase over and over, in each row another one: so there are
drafts to check, rows hit different experts, and everything is warm that the first request would
have to wait for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from random import Random
from typing import Protocol
from uuid import uuid4

from scheduler.messages import (
    Batch,
    BatchKind,
    PrefillRow,
    ReplicaSpec,
    Sampling,
    StepResult,
    StepRow,
    TriedBatch,
)

_log = logging.getLogger("lockstep.replica")

ROWS = (1, 8)
DRAFT_LENS = (0, 4)
STEPS = 4
"""Timed steps of each kind, after one that does not count."""
LENGTH = 64
"""Tokens of a trial sequence before its first step."""
PHRASE = 8
"""Tokens of it until they come again."""
CHUNKS = (16, 64, 256)
"""Tokens of the trial prefills; what more of them behind others cost shows in use."""
PREFILLS = 2
"""Timed prefills of each kind, likewise."""
RIGHT_ROWS, RIGHT_STEPS = 4, 32
"""Of the trial that shows how often a drafter that sees hidden states is right."""
RIGHT_LEAST = 0.05
"""Share of first draft tokens that even a poor one gets right; one that sees the wrong hidden
states of its target, or has another target's weights, does not."""
CHUNK_S_MAX = 0.3
"""After a prefill that took longer no larger one is tried, but for the second, without which
nothing tells what a token costs: loading shall not wait for it."""


class Trial(Protocol):
    """What is tried: a `replicas.replica.Replica`."""

    spec: ReplicaSpec

    def step(self, batch: Batch, interrupted: Callable[[], bool] = ...) -> StepResult: ...

    def release(self, sequence_ids: Iterable[str]) -> None: ...


def calibrate(
    replica: Trial, rows_max: int = max(ROWS), draft_len_max: int = max(DRAFT_LENS)
) -> tuple[TriedBatch, ...]:
    """Steps of few and many rows, with and without drafting, and prefills of few and many tokens.
    Leaves no resident behind.

    A replica with room for less is tried with less, as one whose memory is planned for batches of
    at most so many rows and draft tokens; without any there are no trials.
    """
    return (*_prefills(replica), *_steps(replica, rows_max, draft_len_max))


def calibrated(
    replica: Trial, rows_max: int, draft_len_max: int, aux_layers: Sequence[int]
) -> ReplicaSpec:
    """The replica's spec with what trials have found; warns of a drafter on hidden states that is
    hardly ever right."""
    spec = replace(replica.spec, trials=calibrate(replica, rows_max, draft_len_max))
    if not aux_layers or min(spec.draft_len_max, draft_len_max) == 0:
        return spec
    share = first_right(replica, min(rows_max, RIGHT_ROWS))
    spec = replace(spec, acceptance=share)
    if share is None or share >= RIGHT_LEAST:
        return spec
    warning = f"only {share:.1%} of first draft tokens right at load: the wrong weights or layers?"
    _log.warning("%s: %s", spec.draft, warning)
    return replace(spec, drafter=f"{spec.drafter}; {warning}")


def first_right(replica: Trial, rows: int) -> float | None:
    """Share of first draft tokens that the target accepts in texts that it makes up; None without
    room for them."""
    spec, rng = replica.spec, Random(0)
    length = 2 + 2 * RIGHT_STEPS
    blocks = -(-length // spec.block_size)
    if length > spec.context_len or rows * spec.blocks_taken(blocks) > spec.kv_blocks:
        return None
    contents = [tuple(rng.choices(range(spec.vocab_size), k=2)) for _ in range(rows)]
    tried_out = _tried(replica, contents, 2 * RIGHT_STEPS, [1] * (RIGHT_STEPS - 1), 0.7)
    results = [row for _, result in tried_out[1:] for row in result.rows]
    tried = sum(row.tried_at[0] for row in results)
    return sum(row.accepted_at[0] for row in results) / tried if tried else None


def probe(replica: Trial) -> None:
    """Fill a short row and step it, with a draft token if there is a drafter; raises what that
    raises."""
    _tried(replica, [(0, 0)], 2, [min(replica.spec.draft_len_max, 1)])


def _tried(
    replica: Trial,
    contents: Sequence[tuple[int, ...]],
    left: int,
    draft_lens: Iterable[int] = (),
    temperature: float = 0.0,
) -> list[TriedBatch]:
    """Fill rows of equal length, with so many tokens left, and run a step of all for each draft
    length; then they are gone. The prefill comes first."""
    blocks = -(-(len(contents[0]) + left) // replica.spec.block_size)
    begun = []
    for row, content in enumerate(contents):
        sampling = Sampling(temperature=temperature, seed=row)
        # With a salt of its own none finds the prefix of another.
        salt = uuid4().hex
        begun.append(PrefillRow(f"trial {row}", content, left, sampling, (), blocks, salt=salt))
    lengths = {row.sequence_id: len(row.tokens) for row in begun}
    batch = Batch(0, "", BatchKind.PREFILL, prefill=tuple(begun))
    try:
        done = [(batch, replica.step(batch))]
        for draft_len in draft_lens:
            ordered = sorted(lengths, key=lengths.__getitem__)
            rows = tuple(StepRow(id, lengths[id], draft_len, blocks) for id in ordered)
            batch = Batch(0, "", BatchKind.SPECULATE, rows=rows, draft_len=draft_len)
            done.append((batch, replica.step(batch)))
            for result in done[-1][1].rows:
                lengths[result.sequence_id] += len(result.tokens)
    finally:
        replica.release(lengths)
    return done


def _prefills(replica: Trial) -> list[TriedBatch]:
    spec = replica.spec
    found: list[TriedBatch] = []
    for size in CHUNKS:
        content = _phrases(spec, size + 1)
        blocks = -(-(len(content) + 1) // spec.block_size)
        if len(content) >= spec.context_len or spec.blocks_taken(blocks) > spec.kv_blocks:
            break
        tried = [_tried(replica, [content], 1)[0] for _ in range(PREFILLS + 1)]
        found += tried[1:]
        if len(found) > PREFILLS and min(result.times.total_s for _, result in tried) > CHUNK_S_MAX:
            break
    return found


def _steps(replica: Trial, rows_max: int, draft_len_max: int) -> list[TriedBatch]:
    spec = replica.spec
    longest = min(spec.draft_len_max, draft_len_max)
    draft_lens = list(dict.fromkeys(min(k, longest) for k in DRAFT_LENS))
    each = STEPS + 1
    length_max = LENGTH + each * len(draft_lens) * (max(draft_lens) + 1)
    blocks = -(-length_max // spec.block_size)
    fits = length_max <= spec.context_len
    most = spec.kv_blocks // spec.blocks_taken(blocks) if fits else 0
    most = min(most, spec.rows_max or most, rows_max)
    found: list[TriedBatch] = []
    for count in dict.fromkeys(min(rows, most) for rows in ROWS if most):
        contents = [_phrases(spec, LENGTH, row) for row in range(count)]
        left = length_max - LENGTH
        stepped = _tried(replica, contents, left, [k for k in draft_lens for _ in range(each)])[1:]
        for first in range(0, len(stepped), each):
            found += stepped[first + 1 : first + each]
    return found


def _phrases(spec: ReplicaSpec, length: int, row: int = 0) -> tuple[int, ...]:
    phrase = Random(row).choices(range(spec.vocab_size), k=PHRASE)
    return tuple(islice(cycle(phrase), length))
