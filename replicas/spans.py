"""One pass over spans of several rows, each of its own length: no row is padded.

All products of the pass see the tokens there are, and a few to make up a round number. Attention
goes span by span, each with its own width and as far as it reads: a call per layer and span. Equal
spans are one part.

On the host only, where a call costs some microseconds and padding costs more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from replicas.windows import SCRAP_BLOCK, CacheShape, Part, Window

Span = tuple[int, int]
"""Positions [begin, end) of a row."""

_STEPS = 16
"""Numbers of tokens of a pass between one power of two and the next."""


def round_tokens(tokens: int) -> int:
    """A number of tokens, at most a sixteenth and 15 more, of which there are few.

    oneDNN makes a product's code anew for every number of tokens, some 0.8 ms for each of a layer's
    four kinds: as much as a quarter of a pass of a hundred. It keeps the code of about 1,000.
    """
    if tokens <= _STEPS:
        return tokens
    step = max(_STEPS, (1 << (tokens - 1).bit_length()) // (2 * _STEPS))
    return -(-tokens // step) * step


def spans_window(
    table: torch.Tensor,  # [rows, blocks], int64, on the host
    spans: Sequence[Span],  # of each row; none is empty
    shape: CacheShape,
    tokens: int,
) -> Window:
    """The window of all tokens of the spans, row by row: its positions are [1, tokens].

    Tokens beyond those of the spans belong to no part and are written to the scrap block. For a
    model that reads `in_parts`. Equal spans are best neighbours.
    """
    beyond = (0, tokens - sum(end - begin for begin, end in spans))
    columns = table.numpy()
    size = shape.block_size
    starts = np.array([begin for begin, _ in spans])
    positions = np.concatenate([np.arange(begin, end) for begin, end in spans])
    rows = np.repeat(np.arange(len(spans)), [end - begin for begin, end in spans])
    slots = columns[rows, positions // size] * size + positions % size
    parts: list[Part] = []
    row = 0
    for (begin, end), alike in groupby(spans):
        after = row + len(list(alike))
        parts.append(_part(table[row:after], begin, end, shape))
        row = after
    return Window(
        positions=torch.from_numpy(np.pad(positions, beyond))[None],
        begins=starts,
        slots=torch.from_numpy(np.pad(slots, beyond, constant_values=SCRAP_BLOCK * size)),
        blocks=table[:0, 0],
        length=max(end for _, end in spans),
        mask=None,
        rows=1,
        width=tokens,
        parts=tuple(parts),
    )


def _part(table: torch.Tensor, begin: int, end: int, shape: CacheShape) -> Part:
    """The same span of some rows, whose block table is [rows, blocks]."""
    rows, width = table.shape[0], end - begin
    if begin == 0:
        return Part(table[:0, 0], end, None, rows, width, first=True)
    mask = None
    if width > 1:
        hidden = torch.full((width, end), -torch.inf, dtype=shape.dtype)
        mask = hidden.triu_(begin + 1)[None, None]
    return Part(table[:, : -(-end // shape.block_size)].reshape(-1), end, mask, rows, width)


def cut_up(spans: Sequence[Span], most: int) -> Iterator[list[tuple[int, Span]]]:
    """The spans in passes of at most so many tokens: which rows, and what of each is in the pass.

    Rows of equal spans are neighbours. A span goes into several passes, in order, where it fills
    up one of them.
    """
    one_pass: list[tuple[int, Span]] = []
    left = most
    for row in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[row]
        while begin < end:
            stop = min(end, begin + left)
            one_pass.append((row, (begin, stop)))
            left -= stop - begin
            begin = stop
            if not left:
                yield one_pass
                one_pass, left = [], most
    if one_pass:
        yield one_pass
