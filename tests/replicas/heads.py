"""Tiny random EAGLE-3 heads in both formats of checkpoints, and what a head computes by the
equations: on whole sequences, without a cache."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from replicas.config import ReplicaConfig
from replicas.drafters.eagle3 import Eagle3Source
from replicas.drafters.eagle3.head_config import Eagle3Config, eagle3_config
from replicas.drafters.protocol import DraftSource
from replicas.drafters.suffix_first import SuffixFirstSource
from replicas.pair import Pair
from replicas.replica import Replica
from tests.tiny_pairs import DEVICE, tiny_pair

WIDTH, TARGET_VOCAB, VOCAB = 32, 97, 61
_OF_LAYER = {"attention_bias", "rope_theta", "hidden_size"}


def layer_config(kind: str, **changes: object) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": TARGET_VOCAB,
        "rms_norm_eps": 1e-5,
        **changes,
    }


def said(speculators: bool, kind: str = "llama", **changes: object) -> dict[str, Any]:
    """A config.json."""
    whole = layer_config(kind, **{key: changes.pop(key) for key in _OF_LAYER & changes.keys()})
    if speculators:
        whole = {"speculators_model_type": "eagle3", "transformer_layer_config": whole}
    return {**whole, "draft_vocab_size": VOCAB, **changes}


def tensors_of(config: Eagle3Config, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in config.tensors.items():
        value = torch.rand(shape, generator=generator) + 0.5  # of norms
        if len(shape) > 1:
            value = torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5
        made[name] = value
    if config.vocab_size != config.target_vocab:
        ids = torch.randperm(config.target_vocab, generator=generator)[: config.vocab_size]
        ids = ids.sort().values
        made["d2t"] = ids - torch.arange(config.vocab_size)
        made["t2d"] = torch.zeros(config.target_vocab, dtype=torch.bool)
        made["t2d"][ids] = True
    return made


def save_head(
    path: Path,
    target: Any,
    whole: dict[str, Any],
    own_embedding: bool = False,
    pickled: bool = True,
    **tensors: Any,
) -> str:
    """A random head of this config for a target's config; `tensors` replace some, None drops.
    `pickled`: as heads of the original format mostly are."""
    names = {"d2t"} if whole.get("draft_vocab_size", VOCAB) != TARGET_VOCAB else set()
    if own_embedding:
        names.add("embed_tokens.weight")
    made = tensors_of(eagle3_config(whole, names, target))
    made.update(tensors)
    made = {name: value for name, value in made.items() if value is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(whole))
    original = "speculators_model_type" not in whole
    if original:
        made = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in made.items()}
    if original and pickled:
        torch.save(made, path / "pytorch_model.bin")
    else:
        save_file(
            {name: tensor.contiguous() for name, tensor in made.items()}, path / "model.safetensors"
        )
    return str(path)


def headed_replica(
    path: str, pair: Pair | None = None, suffix: bool = False, **settings: object
) -> Replica:
    """The tiny Llama, or another pair's target, with the head there, maybe behind suffix
    decoding."""
    pair = pair or tiny_pair("llama")
    config = ReplicaConfig(
        device=DEVICE,
        block_size=4,
        speculative_config={"method": "eagle3", "model": path},
        **{"num_gpu_blocks_override": 512, **settings},
    )
    head = Eagle3Source.load_head(
        path, Eagle3Source.read_head(path, pair.target.config), pair.dtype, pair.device
    )
    source: DraftSource = Eagle3Source(path, head)
    if suffix:
        source = SuffixFirstSource(source)
    return Replica(dataclasses.replace(pair, draft=source), config)


def plain_head(
    config: Eagle3Config,
    tensors: dict[str, torch.Tensor],
    embeddings: torch.Tensor,  # [target's vocabulary, width]
    hidden: torch.Tensor,  # [positions, layers * target's width]
    content: list[int],  # one more than positions
    k: int,
    rope_theta: float = 10_000.0,
) -> tuple[list[int], torch.Tensor]:
    """k greedy draft tokens after this content, and the logits of each, [k, vocab].

    Everything is computed anew for every token, in float64.
    """
    w = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
    embeddings = w.get("embed_tokens.weight", embeddings.double())
    layer = "layers.0."

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.eps).rsqrt() * w[name + ".weight"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[name + ".weight"].t() + w.get(name + ".bias", torch.zeros(())).double()

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [positions, heads, dim]
        half = x.shape[-1] // 2
        rates = rope_theta ** (-torch.arange(half).double() / half)
        angles = torch.arange(x.shape[0]).double()[:, None, None] * rates
        low, high = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    x = hidden.double()
    if config.fc_norm:
        parts = x.split(config.target_width, -1)
        x = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
    if config.norm_before_fc:
        x = norm(x, "input_norm")
    g = linear(x, "fc")  # [positions, width]: what the layer sees of each position
    tokens = list(content)
    drafts, said = [], []
    for _ in range(k):
        embedded = norm(embeddings[tokens[1:]], layer + "input_layernorm")
        normed = norm(g, layer + "hidden_norm")
        residual = normed if config.norm_before_residual else g
        both = torch.cat((embedded, normed), -1)
        queries, keys, values = (
            linear(both, f"{layer}self_attn.{letter}_proj").view(len(g), -1, config.head_dim)
            for letter in "qkv"
        )
        if config.layer.model_type == "qwen3":
            queries = norm(queries, layer + "self_attn.q_norm")
            keys = norm(keys, layer + "self_attn.k_norm")
        group = config.num_attention_heads // config.num_key_value_heads
        queries, keys = rotate(queries), rotate(keys).repeat_interleave(group, 1)
        values = values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / config.head_dim**0.5
        hidden_from = torch.ones_like(scores, dtype=torch.bool).triu(1)
        share = scores.masked_fill(hidden_from, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", share, values).flatten(1)
        y = residual + linear(mixed, layer + "self_attn.o_proj")
        inner = norm(y, layer + "post_attention_layernorm")
        gate = linear(inner, layer + "mlp.gate_proj")
        inner = torch.nn.functional.silu(gate) * linear(inner, layer + "mlp.up_proj")
        out = (y + linear(inner, layer + "mlp.down_proj"))[-1:]
        logits = linear(norm(out, "norm"), "lm_head")[0]
        token = int(logits.argmax())
        said.append(logits)
        drafts.append(token + int(tensors["d2t"][token]) if "d2t" in tensors else token)
        tokens.append(drafts[-1])
        g = torch.cat((g, norm(out, "norm") if config.norm_output else out))
    return drafts, torch.stack(said)
