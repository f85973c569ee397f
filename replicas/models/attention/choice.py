"""Which attention a model gets on a GPU: the fastest one that computes the same.

Gathering runs anywhere and is what the others are held against: on the loaded model, over rows of
different lengths in blocks out of order, logits must be equal but for rounding. Of those that are,
`auto` takes the one whose passes were fastest.

Called while no sequence has a block. What a trial leaves in the cache is cleared where it may be no
number: rows read masked positions, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from time import perf_counter

import torch

from replicas.kv_cache import CacheShape, DeviceLayout
from replicas.models.attention.paged import FlexAttention, PagedBackend, VarlenAttention
from replicas.models.paged_model import ERROR_FLOOR, Layout, PagedModel, fill

AUTO, GATHER, FLEX, VARLEN = "auto", "gather", "flex", "varlen"

GAIN_LEAST = 0.03
"""Part of gathering's time that another must save: less does not pay for another kernel."""
ROWS_MOST = 8
LENGTHS = (256, 2048)
"""KV positions of timed passes, as far as cache and context hold them."""
WIDTHS = (1, 2, 5)
"""Tokens per row of the passes that are compared and timed."""
_SAME_LENGTH = 100
"""Positions of the longest row that is compared."""
_PASSES, _ROUNDS = 10, 3

_log = logging.getLogger("lockstep.replica")


class AttentionRefused(ValueError):
    """The attention asked for is not to be had here, or computes something else."""


def choose_attention(model: PagedModel, wanted: str, shape: CacheShape, rows_most: int) -> None:
    """Give a model on a device the attention that the config wants.

    `auto` keeps gathering where the others do not fit, fail or are slower. Raises AttentionRefused
    for one that was asked for by name and does not compute the same.
    """
    if wanted == GATHER:
        return
    device, cache = model.device, model.cache
    makes: dict[str, Callable[[], FlexAttention | VarlenAttention]] = {
        FLEX: lambda: FlexAttention(cache.blocks, shape.block_size, shape.context_len, device),
        VARLEN: lambda: VarlenAttention(cache.dtype, device),
    }
    trial = _Trial(model, shape, min(rows_most, ROWS_MOST))
    usable = {GATHER: model}
    for name in makes if wanted == AUTO else (wanted,):
        try:
            backend = PagedBackend(cache, shape, makes[name]())
            other = PagedModel(model.model, cache, backend, model.arithmetic, model.decoder)
            trial.compare(other)
            usable[name] = other
        except Exception as error:  # a kernel's compiler may raise anything
            if wanted != AUTO:
                raise AttentionRefused(f"attention {name!r} is not to be had: {error}") from error
            _log.info("attention: %s is left out: %s", name, str(error).splitlines()[:1])
            cache.clear()
    if wanted == AUTO and len(usable) > 1:
        times = {name: trial.times(one) for name, one in usable.items()}
        wanted = fastest(times)
        passes = {name: [f"{1e3 * one:.2f}" for one in each] for name, each in times.items()}
        _log.info("attention: %s; milliseconds per pass: %s", wanted, passes)
    model.backend = usable.get(wanted, model).backend


def fastest(times: Mapping[str, Sequence[float]]) -> str:
    """The name whose passes take the least time; each pass counts as its share of gathering's.

    `times` holds seconds of the same passes for every name, `gather` among them. Another name must
    save GAIN_LEAST of the time, in the geometric mean over passes.
    """
    base = times[GATHER]

    def share(name: str) -> float:
        ratios = [log(one / other) for one, other in zip(times[name], base, strict=True)]
        return exp(sum(ratios) / len(ratios)) if ratios else 1.0

    best = min(times, key=share)
    return best if share(best) <= 1 - GAIN_LEAST else GATHER


class _Trial:
    """Passes of one model over random rows."""

    def __init__(self, model: PagedModel, shape: CacheShape, rows: int) -> None:
        self._model = model
        self._shape = shape
        self._rows = max(1, min(rows, model.cache.blocks // 2))
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(
            model.vocab, (self._rows, shape.context_len), generator=generator
        )

    def _room(self) -> int:
        """Positions that each row can have."""
        blocks = self._model.cache.blocks // self._rows
        return min(blocks * self._shape.block_size, self._shape.context_len)

    def _table(self, length: int) -> torch.Tensor:
        """Blocks for `length` positions per row; those of a row lie apart and in reverse."""
        columns = -(-length // self._shape.block_size)
        blocks = torch.arange(1, self._rows * columns + 1, device=self._model.device)
        return blocks.view(columns, self._rows).flip(0).t().contiguous()

    @torch.inference_mode()
    def compare(self, other: PagedModel) -> None:
        """Raises AttentionRefused where logits differ from gathering's by more than rounding."""
        model, device = self._model, self._model.device
        widths = [width for width in WIDTHS if width < self._room()]
        longest = min(_SAME_LENGTH, self._room() - max(widths))
        # From the longest to the shortest: in a row of few positions each of them counts.
        starts = [max(longest >> row, 1) for row in range(self._rows)]
        table = self._table(longest + max(widths))
        contents = self._tokens[:, : longest + 1].tolist()
        fill(model, contents, [(0, start) for start in starts], table, self._tokens.numel())
        ranges = [(start // 2, start) for start in starts if start > 1]
        for width in widths:
            tokens = self._tokens[:, :width].to(device).reshape(-1)
            window = DeviceLayout(table, starts, width, self._shape).window(0, width)
            _compare(model, other, tokens, window)
        if ranges:
            some = table[: len(ranges)]
            fed = torch.cat([self._tokens[row, a:b] for row, (a, b) in enumerate(ranges)])
            layout = model.backend.ranges_layout(some, ranges)
            _compare(model, other, fed.to(device), layout)

    @torch.inference_mode()
    def times(self, model: PagedModel) -> list[float]:
        """Seconds of a pass of each width and length, the best of a few rounds."""
        seconds = []
        room = self._room() - max(WIDTHS)
        for length in dict.fromkeys(min(length, room) for length in LENGTHS if room > 0):
            table = self._table(length + max(WIDTHS))
            starts = [length - (row % 4) * (length // 16) for row in range(self._rows)]
            for width in WIDTHS:
                layout = DeviceLayout(table, starts, width, self._shape)
                tokens = self._tokens[:, :width].to(model.device).reshape(-1)
                seconds.append(_seconds(model, tokens, layout, width))
        return seconds


def _compare(model: PagedModel, other: PagedModel, tokens: torch.Tensor, layout: Layout) -> None:
    expected, got = (one.forward(tokens, layout).logits for one in (model, other))
    assert expected is not None
    assert got is not None
    limit = ERROR_FLOOR[expected.dtype] * expected.abs().max()
    if not bool((got - expected).abs().max() <= limit):
        raise AttentionRefused("logits differ from gathering's")


def _seconds(model: PagedModel, tokens: torch.Tensor, layout: DeviceLayout, width: int) -> float:
    def run() -> None:
        model.forward(tokens, layout.window(0, width))

    def wait() -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    for _ in range(_ROUNDS):
        run()
    best = float("inf")
    for _ in range(_ROUNDS):
        wait()
        start = perf_counter()
        for _ in range(_PASSES):
            run()
        wait()
        best = min(best, (perf_counter() - start) / _PASSES)
    return best
