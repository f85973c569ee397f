"""A planted head: random weights that cost what a real head's do, beside a planted target.

Its layer and its logits are computed and then left out: what it proposes is the map that a planted
target follows, so it is right as often as that target follows it. The draft tokens of a real head
would not hold the map of a larger vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from replicas.drafters.eagle3.head_config import Eagle3Config, eagle3_config

PLANTED_HEAD = "planted:head"
_VOCAB_SHARE = 4
"""It drafts from one in so many of the target's tokens: published heads mostly from 32,000 of some
130,000 to 150,000."""


def planted_head(target: Any) -> Eagle3Config:
    """As wide as the target, of a layer like the target's."""
    heads = target.num_attention_heads
    layer = AutoConfig.for_model(
        "llama",
        num_hidden_layers=1,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        vocab_size=target.vocab_size,
    )
    vocab = target.vocab_size // _VOCAB_SHARE
    said = {**layer.to_dict(), "model_type": "llama", "draft_vocab_size": vocab}
    return eagle3_config(said, (), target)


def planted_tensors(
    config: Eagle3Config, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    made = {}
    for name, shape in config.tensors.items():
        made[name] = torch.ones(shape, dtype=dtype, device=device)
        if len(shape) > 1:
            made[name].normal_(0.0, shape[-1] ** -0.5, generator=generator)
    return made
