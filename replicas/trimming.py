"""Which draft tokens the target checks, where it checks fewer than were proposed.

The rule is TETRIS (arXiv 2502.15197): of all rows together those are checked that the draft itself
believes in most. Acceptance is by equality, so the choice changes how many tokens a step commits
and never which.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Trimmed:
    """The tokens of the verify pass: each row's last committed one, then the chosen draft tokens.

    A cell is a place in the grid of rows and positions, [rows, 1 + k]: row * (1 + k) + column.
    """

    of_row: torch.Tensor  # [rows + count], int64: whose token it is
    cells: torch.Tensor  # [rows + count], int64
    seen: torch.Tensor  # [rows, 1], int64: draft tokens chosen of each row


def trimmed(
    belief: torch.Tensor,  # [rows, k], float32: log-probability of a draft token and all before it
    draft_lens: torch.Tensor,  # [rows, 1], int64
    count: int,
) -> Trimmed:
    """The `count` draft tokens that are likeliest to be right, none without those before it.

    Belief falls along a row, and of equals the earlier column comes first, so the best always hold
    whole beginnings of rows. Tokens beyond a row's own draft length come last. On a device nothing
    is read back.
    """
    if belief.device.type == "cpu":
        return _on_host(belief, draft_lens, count)
    return _on_device(belief, draft_lens, count)


def _on_device(belief: torch.Tensor, draft_lens: torch.Tensor, count: int) -> Trimmed:
    rows, k = belief.shape
    # A draft beyond the range of its numbers believes in nothing from there on.
    belief = belief.nan_to_num(nan=-torch.inf)
    beyond = torch.arange(k, device=belief.device) >= draft_lens
    # A parallel sum may round a later total above an earlier one.
    falling = belief.cummin(dim=1).values.masked_fill(beyond, -torch.inf)
    best = falling.t().reshape(-1).sort(descending=True, stable=True).indices[:count]
    row, column = best % rows, torch.div(best, rows, rounding_mode="floor")
    every = torch.arange(rows, device=belief.device)
    of_row = torch.cat((every, row))
    cells = of_row * (k + 1) + torch.cat((torch.zeros_like(every), column + 1))
    seen = torch.zeros_like(every).index_add_(0, row, torch.ones_like(row))
    return Trimmed(of_row, cells, seen[:, None])


def _on_host(belief: torch.Tensor, draft_lens: torch.Tensor, count: int) -> Trimmed:
    """The same, step by step; numpy's operations on small arrays take a tenth of the time."""
    rows, k = belief.shape
    numbers = belief.numpy()
    believed = np.where(np.isnan(numbers), -np.inf, numbers)
    falling = np.minimum.accumulate(believed, axis=1)
    falling[np.arange(k) >= draft_lens.numpy()] = -np.inf
    best = np.argsort(-falling.T.reshape(-1), kind="stable")[:count]
    column, row = np.divmod(best, rows)
    every = np.arange(rows)
    of_row = np.concatenate((every, row))
    cells = of_row * (k + 1)
    cells[rows:] += column + 1
    seen = np.bincount(row, minlength=rows)
    return Trimmed(
        torch.from_numpy(of_row), torch.from_numpy(cells), torch.from_numpy(seen[:, None])
    )
