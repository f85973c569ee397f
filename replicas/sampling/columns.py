"""The likeliest tokens of a vocabulary, without sorting it."""

from __future__ import annotations

import torch

_COLUMNS = 512
_COLUMNS_PER_TOKEN = 16
"""The more columns, the fewer scores are left behind them; the fewer, the sooner the best ones are
found."""


def likeliest(
    scores: torch.Tensor,  # [rows, vocab]
    n: int,
) -> torch.Tensor:  # [rows, n], int64
    """Places of the n best scores of each row, in no order.

    The vocabulary is laid into columns. The n best scores lie in the n columns with the best
    maxima, or behind the last whole row of columns.
    """
    rows, vocab = scores.shape
    count = max(_COLUMNS, _COLUMNS_PER_TOKEN * n)
    whole = vocab - vocab % count
    if not whole:
        return scores.topk(n, dim=-1, sorted=False).indices
    maxima = scores[:, :whole].view(rows, -1, count).amax(dim=1)
    columns = maxima.topk(n, dim=-1, sorted=False).indices
    begins = torch.arange(0, whole, count, device=scores.device)
    some = (begins[:, None] + columns[:, None, :]).flatten(1)
    rest = torch.arange(whole, vocab, device=scores.device).expand(rows, -1)
    places = torch.cat((some, rest), dim=-1)
    best = scores.gather(dim=-1, index=places).topk(n, dim=-1, sorted=False).indices
    return places.gather(dim=-1, index=best)
