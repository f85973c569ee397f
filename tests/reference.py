"""What is compared against: transformers' own `generate` of the target alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def plain_greedy(
    model: PreTrainedModel, prompt: Sequence[int], new: int, eos: int | None = None
) -> list[int]:
    """New tokens of a batch-1 greedy run, at most `new`, up to and with `eos`."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
