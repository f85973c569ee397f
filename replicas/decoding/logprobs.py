"""Log-probabilities of tokens under the target's own logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from replicas.sampling import likeliest
from scheduler.decoding import ENTRY, TokenLogprobs

_TIES = 8
"""Tokens beyond those asked for that may tie with the last of them and have a lower id."""
_SORTED = 1 << 18
"""Alternatives that are sorted at once."""
_ENTRIES = np.dtype([("token", "<u4"), ("logprob", "<f4")])
assert _ENTRIES.itemsize == ENTRY.size


def token_logprobs(
    logits: torch.Tensor,  # [places, vocab]
    tokens: Sequence[int],  # [places]
    top: int,
    named: Sequence[int] = (),
) -> tuple[TokenLogprobs, ...]:
    """Of the token in each place, and of the `top` likeliest there (-1: of all tokens), or of the
    `named` ones.

    A token has the same float as itself and among the likeliest. A place's floats do not depend on
    how many places there are.
    """
    if not tokens:
        return ()
    scores = logits.float()
    best = scores.amax(dim=-1, keepdim=True)
    masses = _sums((scores - best).exp_())
    normal = best.squeeze(dim=-1) + masses.log()  # [places]
    own = scores.gather(dim=-1, index=torch.tensor(tokens, device=scores.device)[:, None])
    # Counted as float32, exact up to 2 ** 24: of a mask that is bool it takes four times as long.
    above = torch.gt(scores, own, out=torch.empty_like(scores)).sum(dim=-1)
    ranks = (above.long() + 1).tolist()
    if named:
        ids = torch.tensor(named, device=scores.device).expand(len(tokens), -1)
        packed = _packed(ids, scores.gather(dim=-1, index=ids) - normal[:, None])
    elif top:
        _, vocab = scores.shape
        top = vocab if top == -1 else min(top, vocab)
        at_once = max(1, _SORTED // top)
        packed = []
        for part in zip(torch.split(scores, at_once), torch.split(normal, at_once), strict=True):
            packed += _likeliest(*part, top)
    else:
        packed = [b""] * len(tokens)
    logprobs = (own.squeeze(dim=-1) - normal).tolist()
    return tuple(map(TokenLogprobs, logprobs, ranks, packed))


def _likeliest(
    scores: torch.Tensor,  # [places, vocab], float32
    normal: torch.Tensor,  # [places], float32
    top: int,
) -> list[bytes]:
    """Of each place its `top` likeliest, packed."""
    _, vocab = scores.shape
    ids = likeliest(scores, min(top + _TIES, vocab)).sort(dim=-1).values
    values = scores.gather(dim=-1, index=ids) - normal[:, None]
    # Of equals the lower id stays first.
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return _packed(ids.gather(dim=-1, index=order)[:, :top], values[:, :top])


def _packed(
    ids: torch.Tensor,  # [places, n], int64
    logprobs: torch.Tensor,  # [places, n], float32
) -> list[bytes]:
    """`TokenLogprobs.packed` of each place."""
    entries = np.empty(tuple(ids.shape), _ENTRIES)
    entries["token"], entries["logprob"] = ids.cpu().numpy(), logprobs.cpu().numpy()
    return [row.tobytes() for row in entries]


def _sums(masses: torch.Tensor) -> torch.Tensor:  # [places]
    """Sums along the last dimension, [places, vocab].

    torch divides a long sum among threads by how many there are; numpy adds in one order.
    """
    if not masses.is_cpu:
        return masses.sum(dim=-1)
    return torch.from_numpy(np.add.reduce(masses.numpy(), axis=-1))
