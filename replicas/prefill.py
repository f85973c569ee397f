"""Fill a model's KV cache for spans of several rows at once, in chunks of bounded width."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.model import PagedModel
from replicas.paged_cache import CacheShape, Layout


def prefill(
    model: PagedModel,
    contents: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    table: torch.Tensor,  # [rows, blocks], int64
    shape: CacheShape,
    chunk: int,
) -> None:
    """Write KV for the tokens of each row's span [begin, end); commits nothing.

    Rows end at different places: a chunk holds the rows that still have tokens, padded on the
    right to the longest. `chunk` bounds the width of one forward pass, and so its buffers.
    """
    begins = [begin for begin, _ in spans]
    ends = [end for _, end in spans]
    while True:
        live = [i for i, end in enumerate(ends) if begins[i] < end]
        if not live:
            return
        width = min(chunk, max(ends[i] - begins[i] for i in live))
        tokens = torch.zeros((len(live), width), dtype=torch.int64)
        for row, i in enumerate(live):
            piece = contents[i][begins[i] : min(ends[i], begins[i] + width)]
            tokens[row, : len(piece)] = torch.tensor(piece, dtype=torch.int64)
        starts = [begins[i] for i in live]
        rows = table if len(live) == len(ends) else table[live]
        layout = Layout(rows, starts, width, shape)
        # Only the KV entries are wanted; one position's logits are the least a model computes.
        # A draft may lack ids that only pad the target's embedding.
        known = tokens.clamp(max=model.vocab - 1).to(table.device)
        model.forward(known, layout.window(0, width), logits_to_keep=1)
        for i in live:
            begins[i] += width
