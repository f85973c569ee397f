"""Log-probabilities of tokens under the target's own logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from replicas.sampling import likeliest
from scheduler.decoding import TokenLogprobs

_TIES = 8
"""Tokens beyond those asked for that may tie with the last of them and have a lower id."""


def token_logprobs(
    logits: torch.Tensor,  # [places, vocab]
    tokens: Sequence[int],  # [places]
    top: int,
    named: Sequence[int] = (),
) -> tuple[TokenLogprobs, ...]:
    """Of the token in each place, and of the `top` likeliest there, or of the `named` tokens.

    A token has the same float as itself and among the likeliest. A place's floats do not depend on
    how many places there are.
    """
    if not tokens:
        return ()
    scores = logits.float()
    best = scores.amax(dim=-1, keepdim=True)
    masses = _sums((scores - best).exp_())
    normal = best[:, 0] + masses.log()  # [places]
    own = scores.gather(-1, torch.tensor(tokens, device=scores.device)[:, None])
    # Counted as float32, exact up to 2 ** 24: of a mask that is bool it takes four times as long.
    above = torch.gt(scores, own, out=torch.empty_like(scores)).sum(dim=-1)
    ranks = (above.long() + 1).tolist()
    if named:
        values = scores[:, list(named)] - normal[:, None]
        found = [tuple(zip(named, row, strict=True)) for row in values.tolist()]
    else:
        found = [()] * len(tokens) if not top else _likeliest(scores, normal, top)
    logprobs = (own[:, 0] - normal).tolist()
    return tuple(map(TokenLogprobs, logprobs, ranks, found))


def _likeliest(
    scores: torch.Tensor,  # [places, vocab], float32
    normal: torch.Tensor,  # [places], float32
    top: int,
) -> list[tuple[tuple[int, float], ...]]:
    ids = likeliest(scores, min(top + _TIES, scores.shape[-1]))
    logprobs = (scores.gather(-1, ids) - normal[:, None]).tolist()
    return [
        tuple(sorted(zip(row, values, strict=True), key=lambda pair: (-pair[1], pair[0]))[:top])
        for row, values in zip(ids.tolist(), logprobs, strict=True)
    ]


def _sums(masses: torch.Tensor) -> torch.Tensor:  # [places]
    """Sums along the last dimension, [places, vocab].

    torch divides a long sum among threads by how many there are; numpy adds in one order.
    """
    if masses.is_cpu:
        return torch.from_numpy(np.add.reduce(masses.numpy(), axis=-1))
    return masses.sum(dim=-1)
