"""Proves that a planted pair has the wanted acceptance, is exact, and is what its name says."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, PreTrainedModel

from cluster.local.engine import LocalEngine
from replicas.config import ReplicaConfig, SpeculativeConfig
from replicas.errors import PairRefused
from replicas.models.weights.planted import plant as plant_on, share_following
from replicas.names import SHAPES, parse_planted
from replicas.pair import load_pair
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from tests.reference import plain_greedy

CPU = torch.device("cpu")


def config(target: str, draft: str | None = "planted:tiny-draft", **more: object) -> ReplicaConfig:
    drafting = "none" if draft is None else {"method": "draft_model", "model": draft}
    return ReplicaConfig(
        target=target,
        speculative_config=drafting,
        device="cpu",
        **{"num_gpu_blocks_override": 1024, "block_size": 8, **more},
    )


def plant(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return plant_on(name, CPU, dtype, 0.7)


@pytest.mark.long
@pytest.mark.parametrize("wanted", [0.02, 0.7])
def test_a_served_pair_accepts_what_its_name_says(wanted: float) -> None:
    replica = Replica.load(config(f"planted:tiny?acceptance={wanted}"))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(512, (5 + 3 * i,), generator=generator).tolist() for i in range(12)]
    engine = LocalEngine(replica, SchedulerConfig(rows_max=4, draft_len=4))
    engine.generate([Request(str(i), tuple(p), 60) for i, p in enumerate(prompts)])
    rows = [row for result in engine.results for row in result.rows]
    # Of the drafts that were looked at, not of all: a draft after a wrong one never is.
    accepted = sum(sum(row.accepted_at) for row in rows)
    assert accepted / sum(sum(row.tried_at) for row in rows) == pytest.approx(wanted, abs=0.05)


def test_a_target_is_what_its_name_says_and_strays_by_its_whole_context() -> None:
    """Else a broken cache would go unseen: the first token decides what follows much later."""
    found = plant("planted:tiny?acceptance=0.3")
    assert found.config.planted_follows == pytest.approx(0.3, abs=0.011)
    assert share_following(found, 1) == pytest.approx(0.3, abs=0.05), "on other prompts, too"
    outputs = {tuple(plain_greedy(found, [first, *range(40, 60)], 12)) for first in range(1, 9)}
    assert len(outputs) > 4
    # A scale in the name is the calibrated model without calibration.
    given = plant(f"planted:tiny?scale={found.config.planted_scale!r}")
    assert given.config.planted_follows is None
    for ours, theirs in zip(found.parameters(), given.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("planted:", "neither a directory"),
        ("planted:qwen3-9b", "neither a directory.*qwen3-8b"),
        ("planted:tiny?aceptance=0.5", "aceptance: Extra inputs"),
        ("planted:tiny?acceptance=high", "acceptance: .* a valid number"),
        ("planted:tiny?acceptance=nan", "acceptance: .* less than or equal to 1"),
        ("planted:tiny?acceptance=1.1", "acceptance: .* less than or equal to 1"),
        ("planted:tiny?layers=0", "layers: .* greater than or equal to 1"),
        ("planted:tiny?seed=-1", "seed: .* greater than or equal to 0"),
        ("planted:tiny?scale=0", "scale: .* greater than 0"),
        ("planted:tiny?scale=inf", "scale: .* finite"),
    ],
)
def test_bad_names_are_refused_with_the_field(name: str, message: str) -> None:
    with pytest.raises(PairRefused, match=message):
        parse_planted(name)
    with pytest.raises(ValidationError, match=rf"target\n.*{message}"):
        ReplicaConfig(target=name)
    with pytest.raises(ValidationError, match=message):
        SpeculativeConfig(method="draft_model", model=name)


def test_a_planted_model_goes_with_another_planted_model_of_its_vocabulary_only() -> None:
    with pytest.raises(PairRefused, match="has no tokenizer"):
        load_pair(config("planted:tiny", "tiny"))
    with pytest.raises(PairRefused, match="151936 tokens"):
        load_pair(config("planted:tiny", "planted:qwen3-0.6b"))
    pair = load_pair(config("planted:tiny?scale=1", None))
    assert pair.draft is None
    assert pair.vocab_size == AutoConfig.for_model(**SHAPES["tiny"]).vocab_size
