"""Tiny random Clover-2 heads, and what a head computes by the equations: on whole sequences,
without a cache, in float64."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from replicas.config import ReplicaConfig
from replicas.drafters.clover import CloverSource
from replicas.drafters.clover.head_config import clover_config
from replicas.pair import Pair
from replicas.replica import Replica
from tests.tiny_pairs import DEVICE, tiny_pair


def said(**changes: Any) -> dict[str, Any]:
    """A config.json."""
    return {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        **changes,
        "clover": {"num_heads": 5, "num_layers": 2, **changes.get("clover", {})},
    }


def save_clover(
    path: Path, target: Any, whole: dict[str, Any], copies: bool = False, **tensors: Any
) -> str:
    """A random head of this config for a target's config; `tensors` replace some, None drops.
    `copies`: with matrices of its own where the target's are meant."""
    names = {"clover_embed_tokens.weight", "lm_head.weight"} if copies else set()
    config = clover_config(whole, names, target)
    generator = torch.Generator().manual_seed(8)
    made: dict[str, Any] = {}
    for name, shape in config.tensors.items():
        made[name] = torch.rand(shape, generator=generator) + 0.5  # of norms
        if len(shape) > 1 or name.endswith(".bias"):
            made[name] = torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5
    made = {name: value for name, value in {**made, **tensors}.items() if value is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(whole))
    save_file(made, path / "model.safetensors")
    return str(path)


def clover_replica(path: str, pair: Pair | None = None, **settings: object) -> Replica:
    """The tiny Llama, or another pair's target, with the head there."""
    pair = pair or tiny_pair("llama")
    config = ReplicaConfig(
        device=DEVICE,
        block_size=4,
        speculative_config={"method": "clover", "model": path},
        **{"num_gpu_blocks_override": 512, **settings},
    )
    head = CloverSource.load_head(
        path, CloverSource.read_head(path, pair.target.config), pair.dtype, pair.device
    )
    return Replica(dataclasses.replace(pair, draft=CloverSource(path, head)), config)


def plain_clover(
    whole: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    lm_head: torch.Tensor,  # [vocabulary, width]: the target's
    hidden: torch.Tensor,  # [positions, width]: the target's, before its last norm
    content: list[int],  # one more than positions
    drafts: list[int],
) -> torch.Tensor:  # [1 + drafts, vocab]
    """The logits of the token after the content, and after each of these draft tokens."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    e = w.get("clover_embed_tokens.weight", lm_head.double())
    head = w.get("lm_head.weight", lm_head.double())
    eps, dim, heads = (whole[key] for key in ("rms_norm_eps", "head_dim", "num_attention_heads"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w[name + ".weight"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[name + ".weight"].t() + w.get(name + ".bias", torch.zeros(()).double())

    def regressive(x: torch.Tensor, y: torch.Tensor, name: str) -> torch.Tensor:
        q = linear(norm(x, name + ".input_layernorm"), name + ".q").view(len(x), heads, -1)
        k, v = (linear(y, f"{name}.{letter}").view(len(x), heads, -1) for letter in "kv")
        cos = (q * k).sum(-1) / (q.norm(dim=-1) * k.norm(dim=-1))
        return x + (cos[..., None] * v).flatten(1)

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [positions, heads, dim]
        half = dim // 2
        # In float32, as the models that heads are trained for have it.
        rates = 1 / whole["rope_theta"] ** (torch.arange(half).float() / half)
        angles = torch.arange(len(x)).double()[:, None, None] * rates.double()
        low, high = x[..., :half], x[..., half:]
        return torch.cat(
            (low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1
        )

    x = regressive(hidden.double(), e[content[1:]], "clover_head_mlp_rnn")
    for number in range(whole["clover"]["num_layers"]):
        layer = f"layers.{number}."
        inner = norm(x, layer + "input_layernorm")
        q, k, v = (
            linear(inner, f"{layer}self_attn.{letter}_proj").view(len(x), -1, dim)
            for letter in "qkv"
        )
        group = heads // k.shape[1]
        q, k, v = rotate(q), rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        unseen = torch.ones_like(scores, dtype=torch.bool).triu(1)
        share = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", share, v).flatten(1)
        x = x + linear(mixed, layer + "self_attn.o_proj")
        inner = norm(x, layer + "post_attention_layernorm")
        inner = torch.nn.functional.silu(linear(inner, layer + "mlp.gate_proj")) * linear(
            inner, layer + "mlp.up_proj"
        )
        x = x + linear(inner, layer + "mlp.down_proj")
    h = norm(x, "clover_norm")[-1:]
    out = [norm(linear(h, "clover_head_mlp"), "clover_head_norm")]
    for token in drafts:
        h = regressive(h, e[[token]], "clover_head_mlp_rnn2")
        both = torch.cat((h, e[[token]]), -1)
        out.append(norm(linear(both, "clover_head_mlp2"), "clover_head_norm"))
    return torch.cat(out) @ head.t()
