"""Fill models' KV caches for spans of several rows at once: unpadded, or in well-chosen widths."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.model import PagedModel
from replicas.spans import Span, cut_up, round_tokens, spans_window
from replicas.upload import send, upload
from replicas.windows import CacheShape, Layout

PASS_COST_TOKENS = {"cpu": 48, "cuda": 2048}
"""What a forward pass costs beside its tokens, in tokens: launches and interpreter time. A rough
figure is enough; it only decides between a little padding and one pass more."""


def prefill(
    models: Sequence[PagedModel],
    contents: Sequence[Sequence[int]],
    spans: Sequence[Span],
    table: torch.Tensor,  # [rows, blocks], int64
    shape: CacheShape,
    chunk: int,
) -> None:
    """Write each model's KV for the tokens of each row's span [begin, end); commits nothing.

    Models that read in parts get the tokens of all rows as one, the others rows padded to passes of
    one width. `chunk` bounds the width of those, and with the number of rows the tokens of any.
    """
    in_parts = [model for model in models if model.in_parts]
    if in_parts:
        _fill_spans(in_parts, contents, spans, table, shape, chunk * len(spans))
    for model in models:
        if model not in in_parts:
            _fill_rows(model, contents, spans, table, shape, chunk)


def _fill_spans(
    models: Sequence[PagedModel],
    contents: Sequence[Sequence[int]],
    spans: Sequence[Span],
    table: torch.Tensor,
    shape: CacheShape,
    tokens_most: int,
) -> None:
    for one_pass in cut_up(spans, tokens_most):
        rows = [row for row, _ in one_pass]
        fed = [token for row, (begin, end) in one_pass for token in contents[row][begin:end]]
        number = min(round_tokens(len(fed)), tokens_most)
        window = spans_window(table[rows], [span for _, span in one_pass], shape, number)
        tokens = upload([fed + [0] * (number - len(fed))], torch.int64, table.device)
        for model in models:
            model.fill(_known(tokens, model), window)


def _known(tokens: torch.Tensor, model: PagedModel) -> torch.Tensor:
    """A draft may lack ids that only pad the target's embedding."""
    return tokens.clamp(max=model.vocab - 1)


def _fill_rows(
    model: PagedModel,
    contents: Sequence[Sequence[int]],
    spans: Sequence[Span],
    table: torch.Tensor,
    shape: CacheShape,
    chunk: int,
) -> None:
    """Rows end at different places: a pass holds the rows that still have tokens, padded on the
    right to its width, and what is left of longer rows goes into the next pass."""
    pass_cost = PASS_COST_TOKENS.get(table.device.type, PASS_COST_TOKENS["cuda"])
    begins = [begin for begin, _ in spans]
    ends = [end for _, end in spans]
    for width in pass_widths([end - begin for begin, end in spans], chunk, pass_cost):
        live = [i for i, end in enumerate(ends) if begins[i] < end]
        tokens = torch.zeros((len(live), width), dtype=torch.int64)
        for row, i in enumerate(live):
            piece = contents[i][begins[i] : min(ends[i], begins[i] + width)]
            tokens[row, : len(piece)] = torch.tensor(piece, dtype=torch.int64)
        starts = [begins[i] for i in live]
        rows = table
        if len(live) < len(ends):
            rows = table.index_select(0, upload(live, torch.int64, table.device))
        layout = Layout(rows, starts, width, shape)
        model.fill(send(_known(tokens, model), table.device), layout.window(0, width))
        for i in live:
            begins[i] += width


def pass_widths(lengths: Sequence[int], chunk: int, pass_cost: int) -> list[int]:
    """Widths of the passes that fill rows of these lengths at the least cost, in tokens.

    A pass costs `pass_cost` and its width times the rows that still have tokens before it. It ends
    best where some row ends, so the boundaries are chosen among the lengths: the cheapest way to
    each of them, from the cheapest ways to the ones before. Wider gaps than `chunk` are cut up.
    """
    stops = [0, *sorted({length for length in lengths if length > 0})]
    least = [0.0] * len(stops)
    come_from = [0] * len(stops)
    live = [sum(length > stop for length in lengths) for stop in stops]
    for end in range(1, len(stops)):
        ways = []
        for begin in range(end):
            gap = stops[end] - stops[begin]
            passes = -(-gap // chunk)
            ways.append((least[begin] + passes * pass_cost + gap * live[begin], begin))
        least[end], come_from[end] = min(ways)
    widths: list[int] = []
    end = len(stops) - 1
    while end > 0:
        begin = come_from[end]
        gap = stops[end] - stops[begin]
        # In reverse, like the walk: the short piece of a cut gap is its last pass.
        widths += ([gap % chunk] if gap % chunk else []) + [chunk] * (gap // chunk)
        end = begin
    return widths[::-1]
