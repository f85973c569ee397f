"""Proves: packed weights of 4 and 8 bits are read as the equations of GPTQ and AWQ give them, and a
packing that is not read is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

from replicas.config import ReplicaConfig
from replicas.errors import PairRefused
from replicas.models.loader import load_config, read_model
from tests.replicas.families import _SIZES, FAMILIES, family_model

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns in a whole number of AWQ's, from its lowest bits on."""
FOUR_BITS = [sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
"""The numbers of MXFP4."""


def read(path: Path) -> PreTrainedModel:
    return read_model(str(path), ReplicaConfig(target=str(path), device="cpu"), "target")


def in_one_number(numbers: list[int], bits: int) -> int:
    whole = sum(number << (bits * place) for place, number in enumerate(numbers))
    return whole - (1 << 32) if whole >= 1 << 31 else whole


def packed_rows(numbers: Any, bits: int, columns: tuple[int, ...] | None = None) -> torch.Tensor:
    """Each row's numbers packed, 32 / bits into one; in another order with `columns`."""
    per = 32 // bits
    rows = [
        [
            in_one_number([row[at + place] for place in columns or range(per)], bits)
            for at in range(0, len(row), per)
        ]
        for row in numbers.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int32)


def pack(
    layer: str, shape: torch.Size, settings: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tensors of a packed layer, and the weight that they stand for."""
    outputs, inputs = shape
    rng = np.random.default_rng(outputs + inputs)
    bits, awq = settings["bits"], settings["quant_method"] == "awq"
    size = settings["group_size"] if settings["group_size"] > 0 else inputs
    groups = -(-inputs // size)
    numbers = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = rng.integers(1, 1 << bits, (groups, outputs))
    if settings.get("sym"):
        zeros[:] = 1 << (bits - 1)
    scales = torch.rand(groups, outputs).half() / (1 << bits)
    of_group = np.arange(inputs) // size
    if settings.get("desc_act"):
        rng.shuffle(of_group)
    shifted = settings.get("checkpoint_format", "gptq") == "gptq" and not awq
    named = {
        "qweight": packed_rows(numbers, bits, AWQ_COLUMNS)
        if awq
        else packed_rows(numbers.T, bits).t().contiguous(),
        "qzeros": packed_rows(zeros - shifted, bits, AWQ_COLUMNS if awq else None),
        "scales": scales,
    }
    if settings.get("desc_act") or not awq:
        named["g_idx"] = torch.tensor(of_group, dtype=torch.int32)
    weight = np.zeros((outputs, inputs))
    for i in range(inputs):
        for o in range(outputs):
            group = of_group[i]
            weight[o, i] = (int(numbers[i, o]) - int(zeros[group, o])) * float(scales[group, o])
    return {f"{layer}.{name}": tensor for name, tensor in named.items()}, torch.tensor(weight)


def written(folder: Path, kind: str, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Write a checkpoint whose linear layers are packed, but for the output matrix and routers;
    returns the weights that those stand for."""
    family_model(kind).save_pretrained(folder)
    file = folder / "model.safetensors"
    stored, expected = {}, {}
    for name, tensor in load_file(file).items():
        if name.endswith("_proj.weight"):
            of_layer, expected[name] = pack(name.removesuffix(".weight"), tensor.shape, settings)
            stored |= of_layer
        else:
            stored[name] = tensor
    save_file(stored, file, {"format": "pt"})
    change(folder, quantization_config=settings)
    return expected


def change(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    "settings",
    [
        GPTQ,
        GPTQ | {"sym": True, "group_size": -1},
        GPTQ | {"bits": 8, "group_size": 32},
        GPTQ | {"desc_act": True},
        GPTQ | {"desc_act": True, "bits": 8, "checkpoint_format": "gptq_v2"},
        GPTQ | {"checkpoint_format": "gptq_v2"},
        AWQ,
        AWQ | {"group_size": -1, "version": "GEMM"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_weights_are_those_of_the_equation(tmp_path: Path, settings: dict[str, Any]) -> None:
    expected = written(tmp_path, "llama", settings)
    weights = read(tmp_path).state_dict()
    assert len(expected) == 14
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight.float()), name


def test_packed_experts_have_their_places(tmp_path: Path) -> None:
    expected = written(tmp_path, "qwen3_moe", AWQ)
    model = read(tmp_path)
    at = "model.layers.1.mlp.experts.3."
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    assert torch.equal(experts.down_proj[3], expected[f"{at}down_proj.weight"].float())
    gate, up = (expected[f"{at}{part}_proj.weight"].float() for part in ("gate", "up"))
    assert torch.equal(experts.gate_up_proj[3], torch.cat((gate, up)))


def test_gpt_oss_experts_of_four_bits_are_those_of_the_equation(tmp_path: Path) -> None:
    """MXFP4, as its makers publish it: two numbers in a byte, a power of two for 32 inputs."""
    sizes = {**_SIZES, **FAMILIES["gpt_oss"], "intermediate_size": 64}
    GptOssForCausalLM(GptOssConfig(**sizes)).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.down_proj"
    stored: dict[str, Any] = load_file(file)
    expected = {}
    for weight in [
        weight for weight in stored if weight.endswith("_proj") and ".experts." in weight
    ]:
        experts, inputs, outputs = stored.pop(weight).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, shape, dtype=torch.uint8)
        stored |= {f"{weight}_blocks": blocks, f"{weight}_scales": scales}
        numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
        power = torch.pow(2.0, scales.float() - 127)
        made = torch.tensor(FOUR_BITS)[numbers] * power[..., None]
        expected[weight] = made.flatten(-2).transpose(1, 2)
    save_file(stored, file, {"format": "pt"})
    change(tmp_path, quantization_config={"quant_method": "mxfp4"})
    weights = read(tmp_path).state_dict()
    assert name in expected
    for weight, made in expected.items():
        assert torch.equal(weights[weight], made), weight


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (GPTQ | {"bits": 3}, "bits 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "format 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "format 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "format 'gemv'"),
        (AWQ | {"backend": "llm-awq"}, "format 'llm-awq'"),
        (AWQ | {"bits": 8}, "bits 8"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (AWQ | {"group_size": 0}, "group_size 0"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_packing_that_is_not_read_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    """Before any weight is read."""
    family_model("llama").save_pretrained(tmp_path)
    change(tmp_path, quantization_config=settings)
    with pytest.raises(PairRefused, match=rf"^target: .* with {named}.* of which no plain weights"):
        load_config(str(tmp_path), ReplicaConfig(target=str(tmp_path)), "target")


@pytest.mark.parametrize(
    ("part", "becomes", "message"),
    [
        ("qzeros", None, r"up_proj has no qzeros"),
        ("g_idx", None, r"up_proj has no g_idx"),
        ("g_idx", torch.full((32,), 9, dtype=torch.int32), r"up_proj: g_idx names groups"),
        ("scales", torch.ones(3, 48), r"up_proj: numbers and scales do not fit"),
        ("qweight", torch.ones(4, 48), r"up_proj: qweight is \(4, 48\) of torch.float32"),
        ("weight", torch.ones(48, 32), r"up_proj is stored packed and plain"),
        (
            "extra",
            torch.ones(4),
            r"no place in the model, such as model\.layers\.1\.mlp\.up_proj\.extra",
        ),
    ],
)
def test_a_layers_tensors_that_do_not_fit_are_named(
    tmp_path: Path, part: str, becomes: torch.Tensor | None, message: str
) -> None:
    written(tmp_path, "llama", GPTQ | {"desc_act": True})
    file = tmp_path / "model.safetensors"
    stored: dict[str, Any] = {**load_file(file), f"model.layers.1.mlp.up_proj.{part}": becomes}
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(PairRefused, match=message):
        read(tmp_path)


def test_a_model_whose_weights_lie_transposed_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 11, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    change(tmp_path, quantization_config=GPTQ)
    with pytest.raises(PairRefused, match="GPT2LMHeadModel stores its weights transposed"):
        read(tmp_path)
