"""A head's beginning: its config for a target, and weights from the target's last layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from replicas.drafters import LAYER, Eagle3Config, eagle3_config
from replicas.errors import PairRefused, TrainingRefused
from replicas.training.conversations import Conversation

_NOISE = 0.02
_KINDS = {"llama": "llama", "qwen3": "qwen3"}
"""Layers that a head may have, by those of its target; llama for others."""


def head_settings(
    target: Any, draft_vocab: int, intermediate_size: int | None = None
) -> dict[str, Any]:
    """`config.json` of a new head, in the speculators format. `target`: transformers' config.

    As many key heads as query heads: the embedding of the last token reaches the head through its
    values alone. Raises TrainingRefused.
    """
    vocab = int(target.vocab_size)
    if not 1 <= draft_vocab <= vocab:
        raise TrainingRefused(f"draft_vocab: {draft_vocab} of the target's {vocab} tokens")
    heads, width = int(target.num_attention_heads), int(target.hidden_size)
    dim = getattr(target, "head_dim", None) or width // heads
    rope = getattr(target, "rope_parameters", None) or {}
    layer = AutoConfig.for_model(
        _KINDS.get(target.model_type, "llama"),
        hidden_size=width,
        intermediate_size=intermediate_size or 8 * width // 3 // 64 * 64 or width,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=dim,
        vocab_size=vocab,
        rms_norm_eps=float(getattr(target, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(target.max_position_embeddings),
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 1e4))},
        tie_word_embeddings=False,
        attention_bias=False,
    )
    layers = int(target.num_hidden_layers)
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer.to_diff_dict() | {"model_type": layer.model_type},
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": width,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": aux_layers(layers),
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def aux_layers(layers: int) -> list[int]:
    """The usual three, as transformers numbers hidden states; fewer of a shallow target."""
    usual = [2, layers // 2, layers - 3]
    return usual if layers >= 6 else [0, layers // 2, layers - 1]


def new_config(settings: dict[str, Any], target: Any) -> Eagle3Config:
    """Raises TrainingRefused for a target that no head can be made for."""
    try:
        return eagle3_config(settings, (), target)
    except PairRefused as error:
        raise TrainingRefused(f"target: no EAGLE-3 head can be made for it: {error}") from None


def frequent_tokens(
    conversations: Iterable[Conversation], draft_vocab: int, vocab: int
) -> tuple[torch.Tensor, float]:
    """The ids that answers have most, rising, and their share of all answer tokens. Of equals, and
    where answers have fewer, the lower ids."""
    counts: Counter[int] = Counter()
    for each in conversations:
        counts.update(each.ids[each.answer :])
    order = sorted(range(vocab), key=lambda token: (-counts[token], token))[:draft_vocab]
    share = sum(counts[token] for token in order) / max(1, counts.total())
    return torch.tensor(sorted(order)), share


@torch.no_grad()
def new_tensors(
    config: Eagle3Config, target: PreTrainedModel, ids: torch.Tensor, typical: float, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Weights as `config.tensors` names them: of the target's last layer, norm and logits where
    their shapes fit, else random.

    `typical`: the root mean square of the last of the head's hidden states. The head's residual is
    normed, so what its layer adds is divided by it.
    """
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in config.tensors.items():
        if len(shape) == 1:
            made[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            made[name] = torch.randn(shape, generator=generator) * min(_NOISE, shape[-1] ** -0.5)
    width = config.width
    # It begins with the last of the hidden states.
    made["fc.weight"][:, -width:] += torch.eye(width)
    found = _last_layer(target)
    norm = found.get("input_layernorm.weight", torch.ones(width))
    for letter in "qkv":
        theirs = found.get(f"self_attn.{letter}_proj.weight")
        ours = made[f"{LAYER}self_attn.{letter}_proj.weight"]
        if theirs is None or theirs.shape[1] != width or ours.shape[0] % theirs.shape[0]:
            continue
        groups = ours.shape[0] // theirs.shape[0]
        if groups > 1:  # every query head gets keys and values of its own
            by_head = theirs.view(-1, config.head_dim, width).repeat_interleave(groups, 0)
            theirs = by_head.reshape(-1, width)
        ours[:, width:] = theirs * norm
    for name, scale in (
        ("self_attn.o_proj.weight", 1 / typical),
        ("mlp.down_proj.weight", 1 / typical),
        ("mlp.gate_proj.weight", 1.0),
        ("mlp.up_proj.weight", 1.0),
        ("post_attention_layernorm.weight", 1.0),
        ("self_attn.q_norm.weight", 1.0),
        ("self_attn.k_norm.weight", 1.0),
    ):
        if name in found and LAYER + name in made and found[name].shape == made[LAYER + name].shape:
            made[LAYER + name] = found[name] * scale
    last = getattr(getattr(target, "model", None), "norm", None)
    if last is not None and getattr(last, "weight", torch.empty(0)).shape == (width,):
        made["norm.weight"] = last.weight.detach().float().cpu().clone()
    logits = target.get_output_embeddings()
    if logits is not None and logits.weight.shape[1] == width:
        made["lm_head.weight"] = logits.weight.detach()[ids.to(logits.weight.device)].float().cpu()
    return made


def _last_layer(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    layers = getattr(getattr(target, "model", None), "layers", None)
    if layers is None:
        return {}
    return {name: value.detach().float().cpu() for name, value in layers[-1].named_parameters()}
