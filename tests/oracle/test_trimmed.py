"""The oracle where the target checks only the draft tokens that the draft believes in most.

Whatever number of them a batch lets through, outputs are those of plain decoding.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from benchmarks.oracle import OracleDrafter
from cluster.local_engine import LocalEngine, Output
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Batch, BatchKind, Request, StepResult
from tests.oracle.worlds import sampled, world
from tests.tiny_pairs import ARCHITECTURES, VOCAB, tiny_replica

ROWS, K = 5, 4
SEED = 80


class Trimming:
    """A replica whose batches are given a number of draft tokens to verify; None draws one."""

    def __init__(self, replica: Replica, verify: int | None) -> None:
        self.spec = replica.spec
        self.batches: list[tuple[Batch, StepResult]] = []
        self._replica = replica
        self._verify = verify
        self._rng = random.Random(0 if verify is None else verify)

    def step(self, batch: Batch) -> StepResult:
        if batch.kind is not BatchKind.SPECULATE:
            return self._replica.step(batch)
        most = len(batch.rows) * batch.draft_len
        verify = self._rng.randint(0, most) if self._verify is None else self._verify
        batch = replace(batch, verify_tokens=verify)
        result = self._replica.step(batch)
        self.batches.append((batch, result))
        return result

    def release(self, sequence_ids: Iterable[str]) -> None:
        self._replica.release(sequence_ids)


def run(replica: Replica, requests: list[Request], verify: int | None) -> list[Output]:
    trimming = Trimming(replica, verify)
    config = SchedulerConfig(rows_max=ROWS, draft_len=K)
    outputs = LocalEngine(trimming, config, check=True).generate(requests)
    replica.check_integrity()
    for batch, result in trimming.batches:
        assert batch.verify_tokens is not None
        most = result.steps * batch.verify_tokens
        assert sum(sum(row.accepted_at) for row in result.rows) <= most
        for row in result.rows:
            assert all(a <= t for a, t in zip(row.accepted_at, row.tried_at, strict=True))
            assert len(row.tokens) == row.steps + sum(row.accepted_at)
    return outputs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("verify", [None, *range(0, ROWS * K + 1, 3)])
def test_greedy_output_equals_plain_generate(architecture: str, verify: int | None) -> None:
    outputs = run(tiny_replica(architecture), world(architecture, SEED).requests, verify)
    assert [output.tokens for output in outputs] == world(architecture, SEED).greedy
    assert (sum(output.usage.accepted_tokens for output in outputs) > 0) == (verify != 0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("verify", [None, *range(1, ROWS * K + 1, 6)])
def test_sampled_output_depends_on_the_request_alone(architecture: str, verify: int | None) -> None:
    """Greedy rows among them."""
    outputs = run(tiny_replica(architecture), sampled(world(architecture, SEED).requests), verify)
    assert [output.tokens for output in outputs] == world(architecture, SEED).sampled


@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_so_do_drafts_of_an_oracle(probability: float) -> None:
    of_world = world("qwen3", SEED)
    sequences = [
        [*request.prompt, *tokens]
        for request, tokens in zip(of_world.requests, of_world.greedy, strict=True)
    ]
    replica = tiny_replica("qwen3", drafter=OracleDrafter(sequences, probability, VOCAB))
    outputs = run(replica, of_world.requests, None)
    assert [output.tokens for output in outputs] == of_world.greedy


def test_layers_that_are_not_joined_pack_tokens_as_well() -> None:
    replica = tiny_replica("glm4", fuse_layers=False)
    outputs = run(replica, world("glm4", SEED).requests, None)
    assert [output.tokens for output in outputs] == world("glm4", SEED).greedy
