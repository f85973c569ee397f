"""What a new head takes of its target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import rms_norm
from transformers import AutoConfig, PreTrainedModel

from replicas.errors import PairRefused, TrainingRefused
from replicas.training.conversations import Conversation

_NOISE = 0.02


@contextmanager
def made_for(title: str) -> Iterator[None]:
    """Raises TrainingRefused where a config of the head `title` raises PairRefused."""
    try:
        yield
    except PairRefused as error:
        raise TrainingRefused(f"target: no {title} can be made for it: {error}") from None


def aux_layers(layers: int) -> tuple[int, ...]:
    """The usual three, as transformers numbers hidden states; fewer of a shallow target."""
    usual = (2, layers // 2, layers - 3)
    return usual if layers >= 6 else (0, layers // 2, layers - 1)


def layer_settings(
    target: Any, kind: str, layers: int, kv_heads: int, intermediate_size: int
) -> dict[str, Any]:
    """transformers' config of a head's layers, as wide as those of a target of this config."""
    heads, width = int(target.num_attention_heads), int(target.hidden_size)
    rope = getattr(target, "rope_parameters", None) or {}
    made = AutoConfig.for_model(
        kind,
        hidden_size=width,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=getattr(target, "head_dim", None) or width // heads,
        vocab_size=int(target.vocab_size),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(target.max_position_embeddings),
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 1e4))},
        tie_word_embeddings=False,
        attention_bias=False,
    )
    return {**made.to_diff_dict(), "model_type": made.model_type}


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


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Small matrices, norms of ones, biases of zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            made[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            made[name] = torch.randn(shape, generator=generator) * min(_NOISE, shape[-1] ** -0.5)
    return made


def layer_weights(target: PreTrainedModel, behind: int = 1) -> dict[str, torch.Tensor]:
    """Of the target's last layer, or of one before; nothing where it has no such layers."""
    layers = getattr(target.base_model, "layers", ())
    if len(layers) < behind:
        return {}
    found = layers[-behind].named_parameters()
    return {name: value.detach().float().cpu().clone() for name, value in found}


def last_norm(target: PreTrainedModel) -> torch.Tensor | None:  # [width]
    """What the target's last norm multiplies a state of root mean square 1 with; None: it is no
    such norm."""
    norm = getattr(target.base_model, "norm", None)
    if norm is None:
        return None
    width = int(target.config.hidden_size)
    probe = torch.Generator().manual_seed(0)
    states = torch.randn((2, width), generator=probe)
    like = next(target.parameters())
    weight = norm(torch.ones(width).to(like)).detach().float().cpu()
    found = norm(states.to(like)).detach().float().cpu()
    plain = rms_norm(states, (width,), weight, 1e-6)
    return weight if torch.allclose(found, plain, rtol=0.05, atol=0.05) else None


def output_rows(target: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:  # [ids, width]
    """Of the target's output matrix. Raises TrainingRefused."""
    logits: Any = target.get_output_embeddings()
    width = int(target.config.hidden_size)
    if logits is None or logits.weight.shape[1] != width:
        raise TrainingRefused(f"target: it has no output matrix of its own width, {width}")
    rows: torch.Tensor = logits.weight.detach()[ids.to(logits.weight.device)]
    return rows.float().cpu()


def input_rows(target: PreTrainedModel) -> torch.Tensor:  # [vocabulary, width]
    weight: torch.Tensor = target.get_input_embeddings().weight
    return weight.detach().float().cpu()
