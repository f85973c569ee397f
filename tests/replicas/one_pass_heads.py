"""Tiny random one-pass heads in every format of checkpoints, and what a head computes by the
equations: the whole context and the block anew, without a cache, in float64."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from replicas.config import ReplicaConfig
from replicas.drafters.one_pass import OnePassSource
from replicas.drafters.one_pass.head_config import one_pass_config
from replicas.pair import Pair
from replicas.replica import Replica
from tests.tiny_pairs import DEVICE, tiny_pair

WIDTH, TARGET_VOCAB, VOCAB, MASK_ID = 32, 97, 61, 96
_OF_LAYERS = {
    *("attention_bias", "hidden_size", "layer_types", "rope_parameters", "rope_theta"),
    *("sliding_window", "use_sliding_window"),
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}


def layers_config(**changes: object) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": TARGET_VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        **changes,
    }


def said(maker: str, **changes: Any) -> dict[str, Any]:
    """A config.json of z_lab, deepspec, or speculators' dflash or dspark."""
    whole = layers_config(**{key: changes.pop(key) for key in _OF_LAYERS & changes.keys()})
    if maker == "z_lab":
        nested = {"mask_token_id": MASK_ID, "target_layer_ids": [0, 1]}
        nested |= changes.pop("dflash_config", {})
        whole |= {"architectures": ["DFlashDraftModel"], "block_size": 5, "num_target_layers": 3}
        return {**whole, "dflash_config": nested, **changes}
    keys: dict[str, Any] = {"block_size": 4, "mask_token_id": MASK_ID}
    if maker == "deepspec":
        keys |= {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [-1, 1]}
        return {**whole, **keys, "markov_rank": 0, "enable_confidence_head": False, **changes}
    keys |= {"speculators_model_type": maker, "transformer_layer_config": whole}
    keys |= {"aux_hidden_state_layer_ids": [2, 0, 1], "draft_vocab_size": VOCAB}
    return {**keys, **changes}


def save_one_pass(path: Path, target: Any, whole: dict[str, Any], **tensors: Any) -> str:
    """A random head of this config for a target's config; `tensors` replace some, None drops."""
    speculators = "speculators_model_type" in whole
    own = speculators or whole["architectures"] != ["DFlashDraftModel"]
    names = {"embed_tokens.weight", "lm_head.weight"} if own else set()
    config = one_pass_config(whole, names | tensors.keys(), target)
    generator = torch.Generator().manual_seed(len(json.dumps(whole)))
    made: dict[str, Any] = {}
    for name, shape in config.tensors.items():
        made[name] = torch.rand(shape, generator=generator) + 0.5  # of norms
        if len(shape) > 1:
            made[name] = torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5
    if config.vocab_size != config.target_vocab:
        ids = torch.randperm(config.target_vocab, generator=generator)[: config.vocab_size]
        ids = ids.sort().values
        made["d2t"] = ids - torch.arange(config.vocab_size)
        made["t2d"] = torch.zeros(config.target_vocab, dtype=torch.bool)
        made["t2d"][ids] = True
    made = {name: value for name, value in {**made, **tensors}.items() if value is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(whole))
    save_file(
        {name: tensor.contiguous() for name, tensor in made.items()}, path / "model.safetensors"
    )
    return str(path)


def one_pass_replica(path: str, pair: Pair | None = None, **settings: object) -> Replica:
    """The tiny Llama, or another pair's target, with the head there."""
    pair = pair or tiny_pair("llama")
    config = ReplicaConfig(
        device=DEVICE,
        block_size=4,
        speculative_config={"method": "dspark", "model": path},
        **{"num_gpu_blocks_override": 512, **settings},
    )
    of_head = OnePassSource.read_head(path, pair.target.config)
    head = OnePassSource.load_head(path, of_head, pair.dtype, pair.device)
    return Replica(dataclasses.replace(pair, draft=OnePassSource(path, head)), config)


class PlainOnePass:
    """A checkpoint by its equations. What a format means is told by the test, not read."""

    def __init__(
        self,
        whole: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        target: Any,  # with weights
        first: int,
        windows: tuple[int | None, ...] = (None, None),
        causal: tuple[bool, ...] = (False, False),
    ) -> None:
        """`first`: the slot that drafts the first token."""
        self._said = {**whole, **whole.get("transformer_layer_config", {})}
        self._w = {
            name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()
        }
        self._w.setdefault("embed_tokens.weight", target.get_input_embeddings().weight.double())
        self._w.setdefault("lm_head.weight", target.get_output_embeddings().weight.double())
        self.ids = torch.arange(TARGET_VOCAB)
        if "d2t" in tensors:
            self.ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        self.first, self._windows, self._causal = first, windows, causal

    def block(self, hidden: torch.Tensor, anchor: int) -> torch.Tensor:  # [slots, width]
        """`hidden`, [context, layers * target's width]: as the head sees it."""
        w, slots = self._w, self._said["block_size"]
        eps, dim = self._said["rms_norm_eps"], self._said["head_dim"]

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w[name + ".weight"]

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return x @ w[name + ".weight"].t() + w.get(name + ".bias", torch.zeros(()).double())

        def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            half = dim // 2
            # In float32, as the models that heads are trained for have it.
            rates = 1 / self._said["rope_theta"] ** (torch.arange(half).float() / half)
            angles = positions.double()[:, None, None] * rates.double()
            low, high = x[..., :half], x[..., half:]
            cos, sin = angles.cos(), angles.sin()
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

        context = norm(hidden.double() @ w["fc.weight"].t(), "hidden_norm")
        mask = w.get("mask_embedding")
        mask = w["embed_tokens.weight"][self._said_mask] if mask is None else mask
        x = torch.stack([w["embed_tokens.weight"][anchor], *[mask] * (slots - 1)])
        x = x * self._said.get("input_embedding_scale", 1.0)
        before = len(context)
        positions = torch.arange(before + slots)
        for number in range(2):
            layer = f"layers.{number}."
            inner = norm(x, layer + "input_layernorm")
            rows = torch.cat((context, inner))
            queries = linear(inner, layer + "self_attn.q_proj").view(slots, -1, dim)
            keys = linear(rows, layer + "self_attn.k_proj").view(len(rows), -1, dim)
            values = linear(rows, layer + "self_attn.v_proj").view(len(rows), -1, dim)
            queries = rotate(norm(queries, layer + "self_attn.q_norm"), positions[before:])
            keys = rotate(norm(keys, layer + "self_attn.k_norm"), positions)
            group = queries.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", queries, keys) / dim**0.5
            for slot in range(slots):
                for place in range(len(rows)):
                    ahead = place - (before + slot)
                    window = self._windows[number]
                    unseen = self._causal[number] and ahead > 0
                    if unseen or (window is not None and abs(ahead) >= window):
                        scores[:, slot, place] = -torch.inf
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
            x = x + linear(mixed, layer + "self_attn.o_proj")
            inner = norm(x, layer + "post_attention_layernorm")
            gate = linear(inner, layer + "mlp.gate_proj")
            inner = torch.nn.functional.silu(gate) * linear(inner, layer + "mlp.up_proj")
            x = x + linear(inner, layer + "mlp.down_proj")
        return norm(x, "norm")

    def logits(self, block: torch.Tensor, before: list[int]) -> torch.Tensor:  # [drafts, vocab]
        """Of each draft token after the tokens `before` it: the anchor, then the drafts so far."""
        w, rank = self._w, self._said.get("markov_rank", 0)
        state = torch.zeros(rank).double()
        made = []
        for token, h in zip(before, block[self.first :], strict=False):
            logits = w["lm_head.weight"] @ h * self._said.get("output_multiplier", 1.0)
            if cap := self._said.get("final_logit_softcapping"):
                logits = (logits / cap).tanh() * cap
            if rank:
                e = w["markov_head.markov_w1.weight"][token]
                kind = self._said.get("markov_head_type", "vanilla")
                if kind == "gated":
                    gate = w["markov_head.gate_proj.weight"] @ torch.cat((h, e))
                    e = e * torch.sigmoid(gate + w["markov_head.gate_proj.bias"])
                if kind == "rnn":
                    z = w["markov_head.joint_proj.weight"] @ torch.cat((state, e, h))
                    g, c, o = (z + w["markov_head.joint_proj.bias"]).chunk(3)
                    state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
                    e = torch.tanh(o)
                logits = logits + w["markov_head.markov_w2.weight"] @ e
            made.append(logits)
        return torch.stack(made)

    def greedy(self, hidden: torch.Tensor, anchor: int, k: int) -> list[int]:
        block, tokens = self.block(hidden, anchor), [anchor]
        for _ in range(k):
            last = self.logits(block, tokens)[-1]
            tokens.append(int(self.ids[last.argmax()]))
        return tokens[1:]

    @property
    def _said_mask(self) -> int:
        return int({**self._said, **self._said.get("dflash_config", {})}["mask_token_id"])
