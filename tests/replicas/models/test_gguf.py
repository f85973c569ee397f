"""Proves: a GGUF file is the model that it was made from, is read once, and is refused clearly."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cluster.config import FrontendConfig
from cluster.frontend.bounded_work import BoundedWork
from cluster.frontend.prompts import ChatPrompt
from cluster.frontend.target_text import TargetText
from replicas import names
from replicas.config import ReplicaConfig
from replicas.errors import PairRefused
from replicas.models.loader import resolve
from replicas.models.weights import gguf
from replicas.pair import load_pair, read_pair
from tests.cluster.fakes import EOS, VOCAB, tokenizer
from tests.tiny_pairs import SHAPE

pytest.importorskip("gguf", reason="GGUF files are written and read by the package gguf")
pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TALK = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's copies are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return gguf.cache_directory()


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    shape = {**SHAPE, "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": EOS}
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "own.gguf"
    write_gguf(path, model)
    return path


def write_gguf(path: Path, model: PreTrainedModel, without: str = "") -> None:
    """A Llama with the tokenizer of the fakes and a chat template, in float32."""
    import json

    from gguf import GGUFWriter, TokenType

    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("own")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    bpe = json.loads(tokenizer().to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].__getitem__))
    kinds = [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (config.vocab_size - 2)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(TEMPLATE)
    for name, weight in tensors(model):
        if name != without:
            writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """By their names in a GGUF file, where the halves of each head's rotation are interleaved."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    config, found = model.config, []
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = weight.view(heads, 2, -1, weight.shape[-1])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        found.append((names.get_name(name, (".weight",)), weight.contiguous()))
    return found


def settings(target: str, **options: object) -> ReplicaConfig:
    options = {"speculative_config": "none", **options}
    return ReplicaConfig(target=target, device="cpu", num_gpu_blocks_override=64, **options)


@pytest.mark.parametrize(
    ("way", "dtype"),
    [("the file", "float32"), ("its directory", "bfloat16"), ("of the hub", "float32")],
)
def test_the_weights_are_those_of_the_file(
    way: str, dtype: str, file: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits they are rounded once. A draft may come from such a file, too."""
    asked = set()

    def fetched(repo_id: str, filename: str) -> str:
        asked.add((repo_id, filename))
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetched)
    hub = "org/model-GGUF:some/model.Q8_0.gguf"
    name = {"the file": str(file), "its directory": str(file.parent), "of the hub": hub}[way]
    drafting = {"method": "draft_model", "model": str(file)}
    pair = load_pair(settings(name, dtype=dtype, speculative_config=drafting))
    assert asked == ({tuple(hub.split(":"))} if way == "of the hub" else set())
    loaded = pair.target.state_dict()
    expected = copy.deepcopy(model).to(getattr(torch, dtype)).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    assert pair.draft is not None
    assert pair.context_len == model.config.max_position_embeddings


def test_the_frontend_has_the_tokenizer_and_the_template_and_needs_no_weights(
    file: Path, cache: Path
) -> None:
    text = TargetText.load(settings(str(file)))
    assert text.encode("the quick") == tuple(tokenizer().encode("the quick").ids)
    assert text.eos_token_ids == (EOS,)
    rendered = BoundedWork(text, FrontendConfig()).rendered_now(ChatPrompt(TALK))
    ids = text.encode_rendered(rendered)
    assert text.tokenizer.decode(list(ids)) == "user: the quick brown fox\n"
    assert not list(cache.rglob("*.safetensors"))


def test_another_content_under_the_same_name_is_another_model(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    path = tmp_path / "one.gguf"
    write_gguf(path, model)
    before = resolve(str(path))
    torch.manual_seed(1)
    write_gguf(path, LlamaForCausalLM(model.config))
    assert resolve(str(path)) != before


def test_what_fails_half_way_leaves_nothing_and_is_made_the_next_time(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_model: PreTrainedModel, part: Path) -> None:
        (part / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedModel, "save_pretrained", fail)
        with pytest.raises(OSError, match="no space"):
            load_pair(settings(str(file)))
    assert not list(cache.rglob("*.safetensors"))
    # Nor does what a killed process has left.
    (next(cache.glob("gguf/*")) / "float32.part").mkdir()
    load_pair(settings(str(file)))


@pytest.mark.long
def test_processes_that_start_at_once_read_it_once_and_later_ones_not_at_all(
    file: Path, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO)\n"
        "from replicas.models.loader import resolve\n"
        "from transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained(resolve(sys.argv[1], weights='float32'))\n"
    )
    command = [sys.executable, "-c", code, str(file)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert "".join(told).count("reading weights") == 1
    with caplog.at_level("INFO", logger="lockstep.replica"):
        copied = load_pair(settings(str(file))).target.state_dict()
    assert not any(": reading weights" in line for line in caplog.messages)
    assert all(torch.equal(copied[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("package", names.READERS)
def test_without_a_package_it_says_what_to_install(
    package: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(PairRefused, match=f"target: .*own.gguf: .* pip install {package}"):
        read_pair(settings(str(file)))
    assert names.demo_target() == names.TINY


def test_a_name_is_that_of_a_gguf_file_or_of_none_or_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "too.gguf").touch()
    for name in (str(tmp_path), "org/model", "org/model-GGUF"):
        assert names.gguf_file(name) is None
    assert names.gguf_file("org/model-GGUF:some/model.Q4_1.gguf") is not None
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"not a model")
    with pytest.raises(PairRefused, match=r"empty\.gguf: not a GGUF file"):
        read_pair(settings(str(empty)))
    with pytest.raises(OSError, match=r"gone\.gguf: no such file"):
        read_pair(settings(str(tmp_path / "gone.gguf")))
    with pytest.raises(PairRefused, match="one of several"):
        read_pair(settings("x/model-00001-of-00002.gguf"))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two").mkdir(exist_ok=True)
        (tmp_path / "two" / name).touch()
    with pytest.raises(PairRefused, match=r"name one .*: a\.gguf, b\.gguf"):
        names.gguf_file(str(tmp_path / "two"))


@pytest.mark.parametrize("cut", [200, -500])
def test_a_part_of_a_file_is_refused(cut: int, file: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.gguf"
    part.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(PairRefused, match=r"part\.gguf: transformers cannot read it"):
        load_pair(settings(str(part)))


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path, model: PreTrainedModel) -> None:
    path = tmp_path / "short.gguf"
    write_gguf(path, model, without="output_norm.weight")
    with pytest.raises(
        PairRefused, match=r"short\.gguf: lacks 1 weights of the model, such as .*norm"
    ):
        load_pair(settings(str(path)))
