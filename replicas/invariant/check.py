"""Whether a loaded model is batch-invariant: measured bit for bit, in passes as steps have them.

Random sequences are computed alone, one token after the other at their edges, and then in wide
passes, in windows of several widths, in a batch, and beside longer and shorter rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ROWS = 3
_EDGE = 12
"""Positions at the beginning, and at the end, that are computed one by one."""


def trial_length(chunk: int, context_len: int) -> int:
    """Positions of each row: past a boundary of KV chunks, and of a tile of tokens."""
    return min(chunk + _EDGE, context_len)


@torch.inference_mode()
def what_changes_logits(model: Any, table: torch.Tensor, length: int) -> str | None:
    """What the model's logits change with, bit for bit: None when with nothing that was tried.

    `model` is a `PagedModel`; `table`, [ROWS, blocks], holds `length` positions per row and belongs
    to no sequence.
    """
    trial = _Trial(model, table, length)
    edge = min(_EDGE, length // 3)
    alone = [*[1] * edge, length - 2 * edge, *[1] * edge]
    for row in range(ROWS):
        trial.run([row], [0], alone, note=True)
    every = list(range(ROWS))
    widths = [7, 1, 2, 9, 3, 5, 4]
    ragged = [length - edge - 5 * row for row in every]
    parts = [edge // 4, 1, edge // 3]
    trials = {
        "the number of tokens per pass": ([0], [0], [length]),
        "the draft length": ([0], [length - sum(widths)], widths),
        "the batch": (every, [0] * ROWS, [length]),
        "the batch and the draft length": (every, [length - sum(widths)] * ROWS, widths),
        "batch mates' length": (every, ragged, [*parts, edge - sum(parts)]),
    }
    for name, (rows, starts, parts) in trials.items():
        if min(starts) >= 0 and trial.run(rows, starts, [part for part in parts if part > 0]):
            return name
    return None


class _Trial:
    def __init__(self, model: Any, table: torch.Tensor, length: int) -> None:
        self._model = model
        self._table = table
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.vocab, (ROWS, length), generator=generator)
        self._tokens = tokens.to(model.device)
        self._noted: dict[tuple[int, int], torch.Tensor] = {}
        """Logits, [vocab], by row and position."""

    def run(
        self, rows: Sequence[int], starts: Sequence[int], widths: Sequence[int], note: bool = False
    ) -> bool:
        """Passes of these widths in turn; whether any logit differs from those noted."""
        places = list(starts)
        for width in widths:
            table = self._table[list(rows)]
            backend = self._model.backend
            layout = backend.step_layout(table, places, width).window(0, width)
            fed = [
                self._tokens[row, start : start + width]
                for row, start in zip(rows, places, strict=True)
            ]
            out = self._model.forward(torch.cat(fed), layout)
            logits = out.logits.view(len(rows), width, -1)
            for index, (row, start) in enumerate(zip(rows, places, strict=True)):
                for column in range(width):
                    key = (row, start + column)
                    if note:
                        self._noted[key] = logits[index, column].clone()
                    elif not torch.equal(logits[index, column], self._noted[key]):
                        return True
            places = [place + width for place in places]
        return False
