"""Whether a loaded model is batch-invariant: measured bit for bit, in passes as steps have them.

Random sequences are computed alone, one token after the other at their edges, and then in wide
passes, in windows of several widths, in a batch, and beside longer and shorter rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ROWS = 3
PIECE = 256
"""KV positions whose weighted values attention sums in one go on a device."""
_EDGE = 12
"""Positions at the beginning, and at the end, that are computed one by one."""


@torch.inference_mode()
def what_changes_logits(model: Any) -> str | None:
    """What the model's logits change with, bit for bit: None when with nothing that was tried.

    `model` is a `PagedModel` whose blocks belong to no sequence.
    """
    size = model.cache.shape.block_size
    # Past a boundary of pieces, and of a tile of tokens.
    length = min(PIECE + _EDGE, model.cache.shape.context_len)
    blocks = min(-(-length // size), model.cache.rooms // _ROWS)
    length = min(length, blocks * size)
    table = torch.arange(1, 1 + _ROWS * blocks, device=model.device).view(_ROWS, blocks)
    table = model.cache.trial_table(table)
    tokens = torch.randint(model.vocab, (_ROWS, length), generator=torch.Generator().manual_seed(0))
    noted: dict[tuple[int, int], torch.Tensor] = {}
    """Logits, [vocab], by row and position."""

    def differs(rows: Sequence[int], starts: Sequence[int], widths: Sequence[int]) -> bool:
        """Passes of these widths in turn; whether any logit differs from those noted before."""
        places = list(starts)
        for width in widths:
            layout = model.backend.step_layout(table[list(rows)], places, width).window(0, width)
            both = list(zip(rows, places, strict=True))
            fed = torch.cat([tokens[row, start : start + width] for row, start in both])
            logits = model.forward(fed.to(model.device), layout).logits.view(len(rows), width, -1)
            for index, (row, start) in enumerate(both):
                for column in range(width):
                    got = logits[index, column]
                    if not torch.equal(noted.setdefault((row, start + column), got.clone()), got):
                        return True
            places = [place + width for place in places]
        return False

    edge = min(_EDGE, length // 3)
    for row in range(_ROWS):  # alone: nothing of it is noted yet
        differs([row], [0], [*[1] * edge, length - 2 * edge, *[1] * edge])
    every = list(range(_ROWS))
    widths = [7, 1, 2, 9, 3, 5, 4]
    ragged = [length - edge - 5 * row for row in every]
    parts = [edge // 4, 1, edge // 3]
    trials = {
        "the number of tokens per pass": ([0], [0], [length]),
        "the draft length": ([0], [length - sum(widths)], widths),
        "the batch": (every, [0] * _ROWS, [length]),
        "the batch and the draft length": (every, [length - sum(widths)] * _ROWS, widths),
        "batch mates' length": (every, ragged, [*parts, edge - sum(parts)]),
    }
    for name, (rows, starts, parts) in trials.items():
        if min(starts) >= 0 and differs(rows, starts, [part for part in parts if part > 0]):
            return name
    return None
