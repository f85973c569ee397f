"""Proves: nothing that lies beside the weights runs, and no pickle is opened, unless asked for."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from cluster.frontend.target_text import TargetText
from replicas.config import ReplicaConfig
from replicas.models.load import PairRefused, resolve
from replicas.models.pair import load_pair
from tests.replicas.heads import layer_config, save_head
from tests.replicas.models.test_pair import WORDS, save_model

MODEL_CODE = """
from pathlib import Path
Path({mark!r}).write_text("it ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class OwnConfig(LlamaConfig):
    model_type = "own-model"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""

Load = Callable[[ReplicaConfig], object]
LOADS = pytest.mark.parametrize("load", [load_pair, TargetText.load], ids=["replica", "frontend"])


def with_own_code(folder: Path, mark: Path, model_type: str, own_tokenizer: bool = False) -> str:
    """A model that names code of its own; running that leaves a mark."""
    path = Path(save_model(folder, WORDS, vocab_size=5))
    (path / "own.py").write_text(MODEL_CODE.format(mark=str(mark)))
    model: dict[str, object] = {
        "model_type": model_type,
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    change(path / "config.json", model)
    if own_tokenizer:
        names = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
        tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": names}
        change(path / "tokenizer_config.json", tokenizer)
    return str(path)


def change(path: Path, settings: dict[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def settings_for(target: str, **options: object) -> ReplicaConfig:
    return ReplicaConfig(target=target, draft=None, device="cpu", **options)


@pytest.fixture(autouse=True)
def _modules_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies such code into a cache before it runs it."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@LOADS
def test_a_model_that_needs_code_of_its_own_is_refused(load: Load, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    target = with_own_code(tmp_path / "model", mark, "own-model")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(settings_for(target))
    assert not mark.exists()


@LOADS
def test_a_model_of_a_known_type_is_loaded_by_the_code_that_is_installed(
    load: Load, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    load(settings_for(with_own_code(tmp_path / "model", mark, "llama")))
    assert not mark.exists()


def test_a_tokenizer_that_needs_code_of_its_own_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    target = with_own_code(tmp_path / "model", mark, "llama", own_tokenizer=True)
    with pytest.raises(ValueError, match="trust_remote_code"):
        TargetText.load(settings_for(target))
    pair = settings_for(target).model_copy(update={"draft": target})
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_pair(pair)
    assert not mark.exists()


@LOADS
def test_the_same_code_runs_when_it_is_trusted(load: Load, tmp_path: Path) -> None:
    """So the mark above is one that running the code would have left."""
    mark = tmp_path / "mark"
    target = with_own_code(tmp_path / "model", mark, "own-model")
    load(settings_for(target, trust_remote_code=True))
    assert mark.exists()


class Bomb:
    """A pickle of it runs a command when it is opened."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._mark}",)


@LOADS
@pytest.mark.parametrize("trusted", [False, True])
def test_pickled_weights_are_not_opened(load: Load, trusted: bool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    target = Path(save_model(tmp_path / "model", WORDS, vocab_size=5))
    (target / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.bin", "model.pt", "tokenizer.pkl"):
        (target / name).write_bytes(pickle.dumps(Bomb(mark)))
    options = settings_for(str(target), trust_remote_code=trusted)
    if load is load_pair:
        with pytest.raises(OSError, match="safetensors"):
            load(options)
    else:
        load(options)
    assert not mark.exists()
    pickle.loads((target / "model.bin").read_bytes())
    assert mark.exists(), "opening one would have left a mark"


def test_weights_are_safetensors_even_where_a_pickle_lies_beside_them(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    target = Path(save_model(tmp_path / "model", WORDS, vocab_size=5))
    (target / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    load_pair(settings_for(str(target)))
    assert not mark.exists()


def test_a_heads_pickle_may_hold_tensors_only(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    target = AutoConfig.from_pretrained(resolve("tiny"))
    layer = layer_config("llama", hidden_size=target.hidden_size)
    head = tmp_path / "head" / "pytorch_model.bin"
    speculative = {"method": "eagle3", "model": save_head(head.parent, target, layer)}
    settings = ReplicaConfig(target="tiny", device="cpu", speculative=speculative)
    load_pair(settings)
    torch.save(Bomb(mark), head)
    with pytest.raises(PairRefused, match=r"model: .*: pytorch_model\.bin is no .* tensors alone"):
        load_pair(settings)
    assert not mark.exists()
    torch.load(head, weights_only=False)
    assert mark.exists(), "opening it would have left a mark"
