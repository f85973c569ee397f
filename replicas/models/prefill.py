"""Fills a model's KV cache for ranges of several rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from replicas.cuda.transfers import upload
from replicas.kv_cache import TokenRange, passes
from replicas.models.paged_model import NONE, Model, Output, Wants

Filled = Callable[[list[int], list[TokenRange], Output], None]
"""Told after each pass: which rows, what of each was computed, and what was wanted of it."""


def fill(
    model: Model,
    contents: Sequence[Sequence[int]],
    ranges: Sequence[TokenRange],
    table: torch.Tensor,  # [rows, blocks], int64
    pass_tokens: int,
    wants: Wants = NONE,
    filled: Filled | None = None,
) -> None:
    """Write KV for the tokens of each row's range, in passes of at most so many tokens."""
    for one_pass in passes(ranges, pass_tokens):
        rows = [row for row, _ in one_pass]
        parts = [part for _, part in one_pass]
        # An id that only the target has, padding of its embedding, is fed as the last one.
        last = model.vocab - 1
        fed = [
            min(token, last) for row, (begin, end) in one_pass for token in contents[row][begin:end]
        ]
        layout = model.backend.ranges_layout(table[rows], parts)
        out = model.forward(upload(fed, torch.int64, table.device), layout, wants)
        if filled is not None:
            filled(rows, parts, out)
