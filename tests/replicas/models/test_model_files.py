"""Proves: nothing that lies beside the weights runs, and no pickle is opened, unless asked for."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from cluster.frontend.target_text import TargetText
from replicas.config import ReplicaConfig, SpeculativeConfig
from replicas.drafters.eagle3 import Eagle3Source
from replicas.errors import PairRefused
from replicas.models.loader import resolve
from replicas.pair import load_pair
from tests.replicas.heads import layer_config, save_head
from tests.replicas.test_pair import WORDS, save_model

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
    return ReplicaConfig(target=target, speculative_config="none", device="cpu", **options)


@pytest.fixture(autouse=True)
def _modules_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies such code into a cache before it runs it."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@LOADS
@pytest.mark.parametrize(
    ("model_type", "trusted", "runs"),
    [("own-model", False, None), ("own-model", True, True), ("llama", False, False)],
    ids=["refused", "trusted", "of a known type"],
)
def test_code_of_a_model_runs_only_where_it_is_needed_and_trusted(
    load: Load, model_type: str, trusted: bool, runs: bool | None, tmp_path: Path
) -> None:
    """None: it is refused. A model of a known type is loaded by the code that is installed."""
    mark = tmp_path / "mark"
    target = with_own_code(tmp_path / "model", mark, model_type)
    refused = pytest.raises(ValueError, match="trust_remote_code")
    with refused if runs is None else nullcontext():
        load(settings_for(target, trust_remote_code=trusted))
    assert mark.exists() == bool(runs)


def test_a_tokenizer_that_needs_code_of_its_own_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    target = with_own_code(tmp_path / "model", mark, "llama", own_tokenizer=True)
    with pytest.raises(ValueError, match="trust_remote_code"):
        TargetText.load(settings_for(target))
    drafting = SpeculativeConfig(method="draft_model", model=target)
    pair = settings_for(target).model_copy(update={"speculative_config": drafting})
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_pair(pair)
    assert not mark.exists()


class Bomb:
    """A pickle of it runs a command when it is opened."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._mark}",)


@LOADS
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("trusted", [False, True])
def test_pickled_weights_are_not_opened(
    load: Load, trusted: bool, beside: bool, tmp_path: Path
) -> None:
    """Nor where they lie beside others."""
    mark = tmp_path / "mark"
    target = Path(save_model(tmp_path / "model", WORDS, vocab_size=5))
    if not beside:
        (target / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.bin", "model.pt", "tokenizer.pkl"):
        (target / name).write_bytes(pickle.dumps(Bomb(mark)))
    options = settings_for(str(target), trust_remote_code=trusted)
    refused = load is load_pair and not beside
    with pytest.raises(OSError, match="safetensors") if refused else nullcontext():
        load(options)
    assert not mark.exists()
    pickle.loads((target / "model.bin").read_bytes())
    assert mark.exists(), "opening one would have left a mark"


def test_a_heads_pickle_may_hold_tensors_only(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    target = AutoConfig.from_pretrained(resolve("tiny"))
    layer = layer_config("llama", hidden_size=target.hidden_size)
    head = tmp_path / "head" / "pytorch_model.bin"
    speculative = {"method": "eagle3", "model": save_head(head.parent, target, layer)}
    settings = ReplicaConfig(target="tiny", device="cpu", speculative_config=speculative)
    load_pair(settings)
    torch.save(Bomb(mark), head)
    with pytest.raises(PairRefused, match=r"model: .*: pytorch_model\.bin is no .* tensors alone"):
        load_pair(settings)
    assert not mark.exists()
    torch.load(head, weights_only=False)
    assert mark.exists(), "opening it would have left a mark"


def with_program(file: Path, program: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Put another pickle in the place of the one in a file that torch has saved."""
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, program if name.endswith("/data.pkl") else data)


def called(name: str, count: int) -> bytes:
    """A pickle of `{"a": name(count)}`."""
    number = b"\x8a\x08" + count.to_bytes(8, "little")
    return (
        b"\x80\x02}X\x01\x00\x00\x00ac"
        + name.replace(" ", "\n").encode()
        + (b"\n" + number + b"\x85Rs.")
    )


LISTS = b"\x80\x02" + b"]" * (1 << 21) + b"0" * ((1 << 21) - 1) + b"."


@pytest.mark.parametrize(
    ("program", "compression"),
    [
        (called("builtins bytearray", 1 << 30), zipfile.ZIP_STORED),
        (called("torch Tensor", 1 << 28), zipfile.ZIP_STORED),
        (called("torch.storage UntypedStorage", 1 << 30), zipfile.ZIP_STORED),
        (LISTS, zipfile.ZIP_STORED),
        (LISTS, zipfile.ZIP_DEFLATED),
        (b"\x80\x02]q\x00.", zipfile.ZIP_STORED),
        (b"\x80\x02}X\x01\x00\x00\x00aNs.", zipfile.ZIP_STORED),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", zipfile.ZIP_STORED),
        (b"", zipfile.ZIP_STORED),
    ],
    ids=["bytes", "tensor", "storage", "lists", "small", "no dict", "no tensor", "torn", "empty"],
)
def test_a_heads_pickle_takes_no_more_memory_than_its_file(
    tmp_path: Path, program: bytes, compression: int
) -> None:
    """Nor is one opened as a head that holds anything but tensors by their names."""
    target = AutoConfig.from_pretrained(resolve("tiny"))
    layer = layer_config("llama", hidden_size=target.hidden_size)
    path = save_head(tmp_path, target, layer)
    with_program(tmp_path / "pytorch_model.bin", program, compression)
    tracemalloc.start()
    try:
        with pytest.raises(PairRefused, match=r"^pytorch_model\.bin is no .* alone$"):
            Eagle3Source.read_head(path, target)
        # What was asked for is a gigabyte, or lists of 100 MiB and more.
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
