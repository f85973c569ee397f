"""What Lockstep is measured against: transformers' own ways to generate, greedily, untouched.

Every run returns the new tokens in the caller's order, exactly `max_new_tokens` each: the end of a
text is not looked for, so that all ways do the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from scheduler.messages import Request


class Assistance(NamedTuple):
    """How assisted generation drafts."""

    draft_tokens: int
    """Most per step; the number does not change."""
    confidence: float = 0.0
    """The draft stops before a token that it gives less than this; 0 never does."""


ASSISTANCES = tuple(Assistance(*how) for how in ((20, 0.4), (20, 0.2), (8, 0.4), (4,), (6,), (8,)))
"""Those that are tried; the first is transformers' default."""
TRIAL_PROMPTS = 2
"""Of those that they are tried on."""


class Transformers:
    """Both models as transformers loads them, with its default attention."""

    def __init__(self, target: Any, draft: Any | None) -> None:
        self._target = target
        self._draft = draft
        # The models' own defaults (a repetition penalty, say) would not be plain greedy decoding.
        target.generation_config = GenerationConfig(pad_token_id=0)

    def batched(self, requests: Sequence[Request], batch: int) -> list[list[int]]:
        """`generate` in batches of neighbours in length, padded on the left."""
        ordered = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
        outputs: list[list[int]] = [[] for _ in requests]
        for begin in range(0, len(ordered), batch):
            members = ordered[begin : begin + batch]
            prompts = [requests[i].prompt for i in members]
            width = max(map(len, prompts))
            rows = [(width - len(prompt), prompt) for prompt in prompts]
            ids = torch.tensor([[0] * blank + list(prompt) for blank, prompt in rows])
            mask = torch.tensor([[0] * blank + [1] * len(prompt) for blank, prompt in rows])
            out = self._generate(ids, mask, max(requests[i].max_new_tokens for i in members))
            for row, i in enumerate(members):
                outputs[i] = out[row, width : width + requests[i].max_new_tokens].tolist()
        return outputs

    def assisted(self, requests: Sequence[Request], how: Assistance) -> list[list[int]]:
        """`generate` with the draft as `assistant_model`; it takes one prompt at a time."""
        assert self._draft is not None, "assisted generation needs a draft"
        # Read from the draft's own config and nowhere else.
        self._draft.generation_config = GenerationConfig(
            pad_token_id=0,
            num_assistant_tokens=how.draft_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=how.confidence,
        )
        outputs = []
        for request in requests:
            ids = torch.tensor([request.prompt])
            out = self._generate(
                ids, torch.ones_like(ids), request.max_new_tokens, assistant_model=self._draft
            )
            outputs.append(out[0, len(request.prompt) :].tolist())
        return outputs

    def _generate(self, ids: Any, mask: Any, new: int, **more: Any) -> Any:
        device = self._target.device
        return self._target.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=new,
            do_sample=False,
            **more,
        )


def fastest_assistance(models: Transformers, requests: Sequence[Request]) -> Assistance:
    """The setting of assisted generation that is fastest on a few of these requests."""
    few = requests[:TRIAL_PROMPTS]

    def seconds(how: Assistance) -> float:
        begun_s = perf_counter()
        models.assisted(few, how)
        return perf_counter() - begun_s

    models.assisted(few[:1], ASSISTANCES[0])  # warm-up
    # The better of two runs each, in turn: a pause of the machine must not decide.
    turns = [[seconds(how) for how in ASSISTANCES] for _ in range(2)]
    best = [min(times) for times in zip(*turns, strict=True)]
    return ASSISTANCES[best.index(min(best))]
