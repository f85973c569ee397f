"""The oracle where requests pin how they are scheduled: outputs are those of plain decoding.

Every batch that the replica runs is checked against the pins of its rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from cluster.local_engine import LocalEngine, Output
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Batch, BatchKind, Pins, Request, SamplingParams, StepResult
from tests.oracle.worlds import mixed_requests, sampled
from tests.reference import plain_greedy
from tests.tiny_pairs import ARCHITECTURES, VOCAB, target_model, tiny_replica

EVERY = Pins(1, 0, 1, 32, trim_drafts=False)
SETTINGS = {
    "all alone": [EVERY],
    "pairs": [Pins(rows_max=2)],
    "near ones": [Pins(spread_max=6)],
    "one of three": [Pins(rows_max=1), Pins(), Pins()],
    "mixed": [Pins(), EVERY, Pins(rows_max=2, spread_max=10), Pins(prefill_tokens_max=32)],
}


class Watched:
    """A replica that notes the batches it runs."""

    def __init__(self, replica: Replica) -> None:
        self.spec = replica.spec
        self.batches: list[Batch] = []
        self._replica = replica

    def step(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        return self._replica.step(batch)

    def release(self, sequence_ids: Iterable[str]) -> None:
        self._replica.release(sequence_ids)


def run(architecture: str, requests: list[Request], **config: object) -> list[Output]:
    """Half of the requests come while the others run."""
    replica = tiny_replica(architecture)
    watched = Watched(replica)
    engine = LocalEngine(watched, SchedulerConfig(rows_max=5, **config), check=True)
    half = len(requests) // 2
    outputs = [engine.submit(request) for request in requests[:half]]
    for _ in range(6):
        engine.advance()
    outputs += [engine.submit(request) for request in requests[half:]]
    engine.run()
    replica.check_integrity()
    pins = {request.id: request.pins for request in requests}
    together = 0
    for batch in watched.batches:
        for row in batch.prefill:
            most = pins[row.sequence_id].prefill_tokens_max
            assert most is None or (row.until or 0) - row.begin <= most
        if batch.kind is not BatchKind.SPECULATE:
            continue
        spread = batch.rows[-1].length - batch.rows[0].length
        together += len(batch.rows) > 1
        for one in (pins[row.sequence_id] for row in batch.rows):
            assert len(batch.rows) <= (one.rows_max or 5)
            assert one.spread_max is None or spread <= one.spread_max
            assert batch.steps <= (one.steps_per_batch_max or batch.steps)
            assert one.trim_drafts or batch.verify_tokens is None
    alone = all(one.rows_max == 1 for one in pins.values())
    assert (together == 0) == alone, "rows step together unless all pin otherwise"
    return outputs


def pinned(requests: list[Request], pins: list[Pins]) -> list[Request]:
    return [replace(one, pins=pins[i % len(pins)]) for i, one in enumerate(requests)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_equals_plain_generate(architecture: str, setting: str) -> None:
    requests = mixed_requests(VOCAB, 12, seed=90 + ARCHITECTURES.index(architecture))
    model = target_model(architecture)
    outputs = run(architecture, pinned(requests, SETTINGS[setting]))
    for request, output in zip(requests, outputs, strict=True):
        assert output.tokens == plain_greedy(model, request.prompt, request.max_new_tokens)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draft_len", [None, 3])
def test_sampled_output_depends_on_the_request_alone(setting: str, draft_len: int | None) -> None:
    requests = sampled(mixed_requests(VOCAB, 12, seed=97))
    alone = LocalEngine(tiny_replica(ARCHITECTURES[0]), SchedulerConfig(rows_max=1, draft_len=0))
    expected = [output.tokens for output in alone.generate(requests)]
    outputs = run(ARCHITECTURES[0], pinned(requests, SETTINGS[setting]), draft_len=draft_len)
    assert [output.tokens for output in outputs] == expected


def test_neither_do_pins_that_differ_from_run_to_run_change_it() -> None:
    """One request with every combination, beside others that pin nothing."""
    rng = random.Random(5)
    others = mixed_requests(VOCAB, 5, seed=98)
    one = Request(
        "one", (3, 1, 4, 1, 5), 24, sampling=SamplingParams(temperature=1.0, seed=7), pins=Pins()
    )
    expected = None
    for _ in range(12):
        pins = Pins(
            rows_max=rng.choice([None, 1, 2]),
            spread_max=rng.choice([None, 0, 9]),
            steps_per_batch_max=rng.choice([None, 1, 3]),
            trim_drafts=rng.random() < 0.5,
        )
        tokens = run(ARCHITECTURES[0], [replace(one, pins=pins), *others])[0].tokens
        expected = expected or tokens
        assert tokens == expected
