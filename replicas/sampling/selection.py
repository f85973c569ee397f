"""Which draft tokens the target checks, where it checks fewer than were proposed.

The rule is TETRIS (arXiv 2502.15197): of all rows together those are checked that the drafter
itself holds most likely. Acceptance is by equality, so the choice changes how many tokens a step
commits and never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Selection:
    """The tokens of the verify pass, row by row: each row's last committed one, then the chosen
    draft tokens.

    A cell is a place in the grid of rows and positions, [rows, 1 + k]: row * (1 + k) + column.
    """

    of_row: torch.Tensor  # [rows + count], int64: whose token it is
    cells: torch.Tensor  # [rows + count], int64, rising
    seen: torch.Tensor  # [rows], int64: draft tokens chosen of each row


def select(
    log_probabilities: torch.Tensor,  # [rows, k], float32: of a draft token and all before it
    draft_lens: Sequence[int],  # [rows]
    count: int,
) -> Selection:
    """The `count` draft tokens that are likeliest to be right, none without those before it.

    Likelihood falls along a row, and of equals the earlier column comes first, so the best always
    hold whole beginnings of rows. Tokens beyond a row's own draft length come last. On a device
    nothing is read back.
    """
    rows, k = log_probabilities.shape
    device = log_probabilities.device
    lens = torch.tensor(draft_lens, dtype=torch.int64).to(device)[:, None]
    # A draft beyond the range of its numbers is likely nowhere from there on.
    likely = log_probabilities.nan_to_num(nan=-torch.inf)
    beyond = torch.arange(k, device=device) >= lens
    # A parallel sum may round a later total above an earlier one.
    falling = likely.cummin(dim=1).values.masked_fill(beyond, -torch.inf)
    best = falling.t().reshape(-1).sort(descending=True, stable=True).indices[:count]
    row, column = best % rows, torch.div(best, rows, rounding_mode="floor")
    every = torch.arange(rows, device=device)
    cells = torch.cat((every * (k + 1), row * (k + 1) + column + 1)).sort().values
    of_row = torch.div(cells, k + 1, rounding_mode="floor")
    seen = torch.zeros_like(every).index_add_(0, row, torch.ones_like(row))
    return Selection(of_row, cells, seen)


def every_draft(draft_lens: Sequence[int]) -> Selection:
    """All draft tokens of rows that have several numbers of them, on a host."""
    width = max(draft_lens) + 1
    of_row = [row for row, length in enumerate(draft_lens) for _ in range(length + 1)]
    columns = [column for length in draft_lens for column in range(length + 1)]
    rows = torch.tensor(of_row)
    return Selection(rows, rows * width + torch.tensor(columns), torch.tensor(draft_lens))
