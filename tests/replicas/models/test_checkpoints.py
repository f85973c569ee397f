"""Proves: a checkpoint is read whole, and what of it would not be computed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, LlamaConfig, LlamaForCausalLM

from replicas.config import ReplicaConfig
from replicas.errors import PairRefused
from replicas.models.loader import read_model
from replicas.models.weights.gguf_contents import GgufContents
from tests.replicas.families import _SIZES, FAMILIES
from tests.tiny_pairs import SHAPE


def read(path: Path) -> Any:
    return read_model(str(path), ReplicaConfig(target=str(path), device="cpu"), "target")


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    config = LlamaConfig(**{**SHAPE, "tie_word_embeddings": True})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def change(path: Path, **changed: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    weights: dict[str, Any] = {**load_file(file), **changed}
    save_file({k: w for k, w in weights.items() if w is not None}, file, {"format": "pt"})


def test_a_tensor_that_the_model_has_no_place_for_is_named(tied: Path) -> None:
    change(tied, **{"model.layers.0.self_attn.sinks": torch.ones(4)})
    with pytest.raises(
        PairRefused,
        match=r"1 tensors .* no place in the model, such as model\.layers\.0\.self_attn",
    ):
        read(tied)


def test_a_weight_that_is_not_there_is_named(tied: Path) -> None:
    change(tied, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(PairRefused, match=r"lacks 1 weights .* model\.layers\.1\.mlp\.up_proj"):
        read(tied)


def test_a_weight_of_another_shape_is_named(tied: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change(tied, **{name: torch.ones(4, 32)})
    with pytest.raises(
        PairRefused, match=rf"{name} has shape \(4, 32\), the model expects \(48, 32\)"
    ):
        read(tied)


def test_what_is_harmless_beside_the_weights_is_passed_over(tied: Path) -> None:
    change(tied, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    read(tied)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_weight_is_stored_twice_with_the_same_values_or_refused(
    tied: Path, same: bool
) -> None:
    weights = load_file(tied / "model.safetensors")
    again = weights["model.embed_tokens.weight"].clone()
    change(tied, **{"lm_head.weight": again if same else again + 1})
    if same:
        read(tied)
        return
    with pytest.raises(PairRefused, match=r"lm_head\.weight and model\.embed_tokens\.weight"):
        read(tied)


def test_of_a_model_that_sees_the_part_for_text_is_read(tmp_path: Path) -> None:
    text = {**_SIZES, **FAMILIES["gemma3_text"]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    model, tokens = read(tmp_path), torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected = whole(input_ids=tokens, token_type_ids=torch.zeros_like(tokens)).logits
        assert torch.allclose(model(input_ids=tokens).logits, expected, atol=1e-5)


# --------------------------------------------------------------------------- GGUF files


def contents(config: LlamaConfig, frequencies: Any = None, **keys: Any) -> GgufContents:
    named = {"general.architecture": "llama", "llama.block_count": 3, **keys}
    return GgufContents(Path("some.gguf"), named, frozenset(["a.weight"]), frequencies)


def test_frequencies_of_a_file_are_those_of_the_model() -> None:
    factors = tuple(1.0 + number / 3 for number in range(4))
    config, given = LlamaConfig(**SHAPE), LlamaConfig(**SHAPE)
    contents(config, factors).apply_to(config)
    model, by_hand = LlamaForCausalLM(config), LlamaForCausalLM(given)
    by_hand.load_state_dict(model.state_dict())
    rotary = by_hand.model.rotary_emb
    rotary.inv_freq.div_(torch.tensor(factors))
    tokens = torch.arange(3, 60)[None]
    with torch.inference_mode():
        got, expected = (loaded.eval()(input_ids=tokens).logits for loaded in (model, by_hand))
    assert torch.allclose(got, expected, atol=1e-5)
    plain = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    plain.load_state_dict(model.state_dict())
    with torch.inference_mode():
        assert not torch.allclose(plain(input_ids=tokens).logits, expected, atol=1e-2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.expert_weights_scale", 2.0),
        ("llama.attention.key_length", 99),
        ("llama.rope.scaling.type", "other"),
        ("tokenizer.ggml.some_new_thing", 1),
    ],
)
def test_a_key_that_would_not_be_applied_is_refused_by_name(key: str, value: Any) -> None:
    config = LlamaConfig(**SHAPE)
    with pytest.raises(PairRefused, match=r"some\.gguf: .*" + str(value)):
        contents(config, **{key: value}).apply_to(config)


def test_a_scaling_of_rotations_is_applied() -> None:
    config = LlamaConfig(**SHAPE)
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    keys = {f"llama.rope.scaling.{name}": value for name, value in scaling.items()}
    contents(config, **keys).apply_to(config)
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["original_max_position_embeddings"] == 64


def test_all_tokens_that_end_a_turn_are_ends() -> None:
    names = ("eos", "eot", "eom")
    ids = {f"tokenizer.ggml.{name}_token_id": at for at, name in enumerate(names, 5)}
    assert contents(LlamaConfig(**SHAPE), **ids).ends == [5, 6, 7]


def test_a_tensor_of_a_file_without_a_place_is_refused() -> None:
    with pytest.raises(PairRefused, match=r"1 tensors .* no place in the model, such as a\.weight"):
        contents(LlamaConfig(**SHAPE)).check_tensors(["b.weight"])


def test_a_configs_mistake_is_not_the_weights(tmp_path: Path) -> None:
    """Experts that the config does not know are no harmless tensors."""
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 2}))
    with pytest.raises(PairRefused, match=r"no place in the model, such as model\.layers\.2\."):
        read(tmp_path)
