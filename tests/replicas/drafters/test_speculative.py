"""Proves that one setting picks the drafter, that what contradicts itself is refused by the field's
name, and that a replica says what drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, LlamaConfig

from replicas.config import ReplicaConfig, SpeculativeConfig
from replicas.drafters.clover import CloverDrafter
from replicas.drafters.eagle3 import Eagle3Drafter, Eagle3Source
from replicas.drafters.model import ModelDrafter
from replicas.drafters.one_pass import OnePassDrafter
from replicas.drafters.suffix import SuffixDrafter
from replicas.drafters.suffix_first import SuffixFirstDrafter
from replicas.errors import PairRefused
from replicas.memory import check_memory
from replicas.models.loader import resolve, resolve_device
from replicas.names import SMOLLM2_HEAD
from replicas.pair import load_pair, read_pair
from replicas.replica import Replica
from tests.replicas import clover_heads, one_pass_heads
from tests.replicas.heads import layer_config, save_head


def loaded(**settings: object) -> Replica:
    return Replica.load(
        ReplicaConfig(**{"device": "cpu", "num_gpu_blocks_override": 256, **settings})
    )


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random one for the embedded target."""
    target = AutoConfig.from_pretrained(resolve("tiny"))
    layer = layer_config("llama", hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    whole = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    whole["draft_vocab_size"] = 512
    return save_head(tmp_path_factory.mktemp("head"), target, whole)


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random one-pass head, of four tokens, for it."""
    target = AutoConfig.from_pretrained(resolve("tiny"))
    sizes = {"hidden_size": target.hidden_size, "draft_vocab_size": 512}
    last = {"aux_hidden_state_layer_ids": [0, target.num_hidden_layers - 1]}
    whole = one_pass_heads.said("dspark", **sizes, **last)
    return one_pass_heads.save_one_pass(tmp_path_factory.mktemp("block"), target, whole)


@pytest.fixture(scope="module")
def clover(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Clover-2 head for it."""
    target = AutoConfig.from_pretrained(resolve("tiny"))
    whole = clover_heads.said(hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    return clover_heads.save_clover(tmp_path_factory.mktemp("clover"), target, whole)


# ------------------------------------------------------------------------------ the setting


NUMBER = "num_speculative_tokens"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"method": "suffix", "modle": "x"}, r"speculative_config\.modle\n.*Extra inputs"),
        ({"method": "sufix"}, r"speculative_config\.method\n.*'draft_model', 'suffix', 'eagle3'"),
        ({"method": "eagle3"}, r"speculative_config\n.*model: method eagle3 needs a model"),
        ({"method": "dspark"}, r"speculative_config\n.*model: method dspark needs a model"),
        (
            {"method": "suffix", "model": "x"},
            r"speculative_config\n.*model: method suffix takes no model",
        ),
        (
            {"method": "suffix", "enable_suffix_decoding": True},
            r"speculative_config\n.*enable_suffix_decoding: method suffix has no model",
        ),
        (
            {"method": "suffix", NUMBER: 33},
            rf"speculative_config\.{NUMBER}\n.*less than or equal to 32",
        ),
        (
            {"method": "none", NUMBER: 2},
            rf"speculative_config\n.*{NUMBER}: method none drafts nothing",
        ),
        (
            {"method": "suffix", "adaptive": False},
            rf"speculative_config\n.*{NUMBER}: must be given if",
        ),
    ],
)
def test_a_setting_that_means_nothing_is_refused_by_name(
    said: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=rf"^1 validation .*\n{message}"):
        ReplicaConfig(speculative_config=said)


def test_where_nothing_is_said_drafts_go_with_the_target() -> None:
    assert ReplicaConfig(target="tiny").drafting.model == "tiny"
    assert ReplicaConfig(target="x/y").drafting == SpeculativeConfig(method="suffix")
    chat = ReplicaConfig(target="smollm2").drafting
    assert (chat.method, chat.model, chat.enable_suffix_decoding) == ("eagle3", SMOLLM2_HEAD, True)
    config = ReplicaConfig(speculative_config="none")
    assert config.drafting == SpeculativeConfig(method="none")
    assert ReplicaConfig.model_validate(config.model_dump()) == config


# ------------------------------------------------------------------------------ the replica


def test_a_replica_says_what_drafts_and_how_far(head: str, block: str, clover: str) -> None:
    for said, kind, told in (
        ({"method": "suffix", NUMBER: 3}, SuffixDrafter, ("suffix", "", 3, None)),
        ({"method": "eagle3", "model": head}, Eagle3Drafter, ("eagle3", head, 32, None)),
        ({"method": "dspark", "model": block}, OnePassDrafter, ("dspark", block, 4, None)),
        ({"method": "clover", "model": clover}, CloverDrafter, ("clover", clover, 5, None)),
        (
            {"method": "eagle3", "model": head, "enable_suffix_decoding": True, NUMBER: 3},
            *(SuffixFirstDrafter, ("suffix, eagle3", head, 3, None)),
        ),
        ({"method": "none"}, type(None), ("", "", 0, None)),
        (
            {"method": "draft_model", "model": "tiny", NUMBER: 4, "adaptive": False},
            *(ModelDrafter, ("draft_model", "tiny", 4, 4)),
        ),
    ):
        replica = loaded(speculative_config=said, calibrate=False)
        assert isinstance(replica.drafter, kind)
        spec = replica.spec
        assert (spec.drafter, spec.draft, spec.draft_len_max, spec.draft_len) == told


def test_the_chat_models_head_is_here_and_fits_it() -> None:
    shape = LlamaConfig(hidden_size=576, num_hidden_layers=30, vocab_size=49_152)
    path = resolve(SMOLLM2_HEAD, "draft")
    config = Eagle3Source.read_head(path, shape)
    head = Eagle3Source.load_head(path, config, torch.float32, torch.device("cpu"))
    assert head.ids is not None
    assert head.ids.shape == (10_240,)
    assert sum(each.stat().st_size for each in Path(path).iterdir()) <= 24_000_000


def test_a_head_is_known_before_its_weights_are_read(head: str, tmp_path: Path) -> None:
    config = ReplicaConfig(device="cpu", speculative_config={"method": "eagle3", "model": head})
    files = read_pair(config)
    assert files.shape == load_pair(config, files).shape
    check_memory(config, files.shape, resolve_device("cpu"))
    gone = ReplicaConfig(speculative_config={"method": "eagle3", "model": "/gone"})
    with pytest.raises(OSError, match=r"^speculative_config\.model: "):
        read_pair(gone)
    other = AutoConfig.from_pretrained(resolve("tiny"))
    other.hidden_size //= 2
    other.save_pretrained(tmp_path)
    with pytest.raises(PairRefused, match=r"speculative_config\.model: .*: .*but the target is"):
        read_pair(config.model_copy(update={"target": str(tmp_path)}))
