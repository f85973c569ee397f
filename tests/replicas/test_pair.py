"""Proves that only pairs that can be served exactly are loaded, and that refusals say why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cluster.local.engine import LocalEngine
from cluster.verify import transformers_model
from replicas.config import ReplicaConfig
from replicas.errors import PairRefused
from replicas.models.loader import dtype_name, resolve, resolve_device
from replicas.pair import check_positions, load_pair, read_pair
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, Sampling
from tests.tiny_pairs import SHAPE


def save_model(
    path: Path, words: list[str], vocab_size: int, eos: str = "<eos>", **shape: int
) -> str:
    """A random Llama with a word-level tokenizer of the given vocabulary."""
    vocab = {word: i for i, word in enumerate([eos, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos).save_pretrained(path)
    config = LlamaConfig(**{**SHAPE, "vocab_size": vocab_size, **shape})
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def config(target: str, draft: str | None, **settings: object) -> ReplicaConfig:
    # Else every replica would fill a tenth of this machine's memory with zeros.
    drafting = "none" if draft is None else {"method": "draft_model", "model": draft}
    return ReplicaConfig(
        target=target,
        speculative_config=drafting,
        device="cpu",
        num_gpu_blocks_override=256,
        **settings,
    )


WORDS = ["a", "b", "c", "d"]


@pytest.fixture
def target(tmp_path: Path) -> str:
    return save_model(tmp_path / "t", WORDS, vocab_size=8)


def set_quantization(target: str, **settings: object) -> None:
    file = Path(target) / "config.json"
    whole = json.loads(file.read_text()) | {"quantization_config": settings}
    file.write_text(json.dumps(whole))


def test_a_pair_with_one_vocabulary_loads_even_if_embeddings_are_padded(
    target: str, tmp_path: Path
) -> None:
    draft = save_model(tmp_path / "d", WORDS, vocab_size=6, num_hidden_layers=1)
    pair = load_pair(config(target, draft))
    assert pair.vocab_size == 5
    assert pair.context_len == 256
    assert pair.draft is not None
    assert not any(parameter.requires_grad for parameter in pair.target.parameters())


def test_different_vocabularies_are_refused_with_the_first_difference(
    target: str, tmp_path: Path
) -> None:
    """Trap 10: target and draft with different vocabularies accepted silently."""
    draft = save_model(tmp_path / "d", ["a", "b", "x", "d"], vocab_size=8)
    with pytest.raises(PairRefused, match=r"2 of them differ.*'c', which is 3 in the target"):
        load_pair(config(target, draft))


def test_different_special_tokens_are_refused(target: str, tmp_path: Path) -> None:
    draft = save_model(tmp_path / "d", WORDS, vocab_size=8)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(draft)
    tokenizer.eos_token = "a"
    tokenizer.save_pretrained(draft)
    with pytest.raises(PairRefused, match=r"eos_token_id is 0 in the target and 1 in the draft"):
        load_pair(config(target, draft))


def test_a_context_over_the_models_limit_is_refused(target: str) -> None:
    with pytest.raises(PairRefused, match="context_len: 257 is over the target's own limit of 256"):
        load_pair(config(target, None, context_len=257))


def test_a_quantized_checkpoint_is_refused_with_its_method(target: str) -> None:
    set_quantization(target, quant_method="bitsandbytes", bits=4)
    with pytest.raises(PairRefused, match=r"target: .* is quantized by bitsandbytes"):
        load_pair(config(target, None))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_in_fp8_is_the_model_with_its_dequantized_weights(
    target: str, dtype: str
) -> None:
    file = Path(target) / "model.safetensors"
    weights = load_file(file)
    plain, stored = dict(weights), dict(weights)
    for name, weight in weights.items():
        if "proj" in name:
            rows, columns = weight.shape
            blocks = weight.view(rows // 8, 8, columns // 8, 8)
            scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
            quantized = (blocks / scales).to(torch.float8_e4m3fn)
            plain[name] = (quantized.float() * scales).view_as(weight)
            stored[name] = quantized.view_as(weight)
            stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
    save_file(stored, file, {"format": "pt"})
    set_quantization(target, quant_method="fp8", weight_block_size=[8, 8])
    of_fp8 = config(target, None, dtype=dtype)
    for model in (load_pair(of_fp8).target, transformers_model(of_fp8, target)):
        loaded = dict(model.named_parameters())
        assert loaded.keys() == plain.keys()
        for name, weight in plain.items():
            assert torch.equal(loaded[name], weight.to(getattr(torch, dtype))), name
    # Joined layers, the plan of memory and the rest find a model like any other.
    replica = Replica.load(of_fp8)
    assert replica.logits([1, 2, 3]).isfinite().all()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_batch_mates_are_refused(kind: str) -> None:
    model = LlamaConfig(**SHAPE)
    model.rope_parameters = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(PairRefused, match="batch mates"):
        check_positions(model)


def test_a_revision_of_the_hub_is_a_snapshot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def snapshot(repo: str, revision: str, allow_patterns: list[str]) -> str:
        return f"/cache/{repo}/{revision}{'/*.bin' if '*.bin' in allow_patterns else ''}"

    monkeypatch.setattr("replicas.models.loader.snapshot_download", snapshot)
    assert resolve("org/model@refs/pr/1") == "/cache/org/model/refs/pr/1"
    assert resolve("word@v1") == "/cache/word/v1"
    assert resolve("org/head@v1", "draft").endswith("*.bin"), "heads come pickled, too"
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model@v1") == "org/model@v1", "a directory that is here is no hub's model"


@pytest.mark.parametrize("own", ["float32", "bfloat16", "float16", "float64"])
def test_dtype_auto_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(
    own: str, tmp_path: Path
) -> None:
    LlamaConfig(**SHAPE, dtype=own).save_pretrained(tmp_path)
    named = ReplicaConfig(target=str(tmp_path), speculative_config="none")
    for device, dtype in (("cpu", "float32"), ("cuda", own if own != "float64" else "float32")):
        assert dtype_name(named.model_copy(update={"device": device})) == dtype
    fixed = {"device": "cuda", "dtype": "float16"}
    assert dtype_name(named.model_copy(update=fixed)) == "float16"


@pytest.mark.parametrize("field", ["target", "speculative_config.model"])
def test_a_model_that_is_not_there_is_named_with_its_setting(field: str, tmp_path: Path) -> None:
    def named(name: str) -> ReplicaConfig:
        if field != "target":
            return ReplicaConfig(speculative_config={"method": "draft_model", "model": name})
        return ReplicaConfig(target=name)

    gone = str(tmp_path / "gone")
    with pytest.raises(OSError, match=f"^{field}: .*gone.* no directory"):
        read_pair(named(gone))
    with pytest.raises(OSError, match=rf"^{field}: .*gone\.gguf: no such file"):
        read_pair(named(f"{gone}.gguf"))
    with pytest.raises(OSError, match=f"^{field}: "):
        read_pair(named("no hub has such a name"))
    with pytest.raises(PairRefused, match=f"^{field}: "):
        read_pair(named(str(tmp_path)))  # nothing is in it


def test_a_directory_may_be_named_from_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve("~/model") == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "number"), [("auto", 2), ("cuda", 2), ("cuda:0", 0), ("cuda:1", 1)]
)
def test_a_gpu_is_always_named_with_its_number(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch makes no device current that has none, so no replica would start on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    made_current = []
    # What there is of set_device where there is no GPU.
    monkeypatch.setattr(torch._C, "_cuda_setDevice", made_current.append, raising=False)
    torch.cuda.set_device(resolve_device(name))
    assert made_current == [number]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(PairRefused, match="torch sees no GPU"):
        resolve_device("cuda:1")


@pytest.mark.long
@pytest.mark.parametrize(("target_vocab", "draft_vocab"), [(40, 6), (6, 40), (5, 5)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_embeddings_padded_to_different_sizes_change_nothing(
    tmp_path: Path, target_vocab: int, draft_vocab: int, temperature: float
) -> None:
    """Random weights choose padding ids often, which trained ones hardly ever do."""
    target = save_model(tmp_path / "t", WORDS, vocab_size=target_vocab)
    draft = save_model(tmp_path / "d", WORDS, vocab_size=draft_vocab, num_hidden_layers=1)
    replica = Replica.load(config(target, draft))
    requests = [
        Request(str(i), (1, 2, 3 + i % 2), 20, Sampling(temperature=temperature, seed=i))
        for i in range(6)
    ]
    outputs = LocalEngine(replica, SchedulerConfig(draft_len=3), check=True).generate(requests)
    plain = LocalEngine(replica, SchedulerConfig(rows_max=1, draft_len=0)).generate(requests)
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    if target_vocab > draft_vocab:
        assert max(max(output.tokens) for output in outputs) >= draft_vocab
