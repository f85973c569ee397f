"""Proves that a replica keeps its residents' state right through batches of every kind.

Output is compared with transformers' `generate` of the target alone, token for token, in float32.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replicas.config import ReplicaConfig
from replicas.names import SHAPES
from replicas.replica import Replica
from scheduler.messages import Batch, BatchKind, StepRow
from tests.reference import plain_greedy
from tests.replicas.pool import Client, prompt
from tests.tiny_pairs import target_model, tiny_replica


def test_a_row_that_is_filled_in_part_can_neither_step_nor_be_filled_from_elsewhere() -> None:
    client = Client(tiny_replica("llama"))
    client.contents["a"] = prompt(23)
    client.prompts["a"] = 23
    client.prefill_until(a=5)
    with pytest.raises(AssertionError, match="filled in part"):
        client.steps(2)
    client.filled["a"] = 4
    with pytest.raises(AssertionError, match="5 of 22"):
        client.prefill_until(a=10)
    assert client.replica.residents == (), "a failed prefill leaves nothing"


def test_a_batch_ends_early_once_a_row_has_reached_its_limit() -> None:
    client = Client(tiny_replica("llama"))
    client.prefill(new=5, a=prompt(4))
    client.prefill(new=50, b=prompt(8))
    result = client.steps(2, 64)
    assert len(client.new_tokens("a")) == 5, "never beyond its limit"
    assert result.steps <= 5
    assert len(client.new_tokens("b")) <= 3 * result.steps


def test_a_batch_ends_early_once_a_row_has_met_a_stop_token() -> None:
    reference = plain_greedy(target_model("llama"), prompt(6), 30)
    stop = next(t for t in reference[4:] if t not in reference[:4])
    client = Client(tiny_replica("llama"), stop=(stop,))
    client.prefill(new=200, a=prompt(6))
    client.steps(3, 64)
    client.check()
    got = client.new_tokens("a")
    assert len(got) - got.index(stop) <= 4, "ends with the step that met it"


def test_an_interrupted_batch_ends_after_the_step_in_hand() -> None:
    client = Client(tiny_replica("llama"))
    client.prefill(new=60, a=prompt(9))
    row = StepRow("a", 9, 3, client.blocks["a"])
    batch = Batch(9, "r", BatchKind.SPECULATE, rows=(row,), draft_len=3, steps=8)
    result = client.replica.step(batch, iter([False, True]).__next__)
    assert result.steps == 2
    tokens = list(result.rows[0].tokens)
    assert tokens == plain_greedy(target_model("llama"), prompt(9), 60)[: len(tokens)]


def fingerprint(shape: str = "tiny", name: str = "layers=2", **settings: object) -> str:
    target = f"planted:{shape}?scale=1&{name}"
    given = {
        "target": target,
        "speculative_config": "none",
        "device": "cpu",
        "num_gpu_blocks_override": 64,
        **settings,
    }
    return Replica.load(ReplicaConfig(calibrate=False, **given)).spec.fingerprint


def test_replicas_whose_output_could_differ_have_other_fingerprints(tmp_path: Path) -> None:
    own = fingerprint()
    drafting = {"method": "draft_model", "model": "planted:tiny-draft"}
    assert (
        own
        == fingerprint()
        == fingerprint(speculative_config=drafting, num_gpu_blocks_override=128)
    )
    turned = {**SHAPES["tiny"], "rope_theta": 5000.0}
    (tmp_path / "config.json").write_text(json.dumps(turned))
    found = [
        own,
        fingerprint(name="layers=3"),
        fingerprint(name="layers=2&seed=1"),
        fingerprint(str(tmp_path)),
        fingerprint(dtype="bfloat16"),
        fingerprint(dtype="bfloat16", deterministic=True),
    ]
    assert len(set(found)) == len(found)
