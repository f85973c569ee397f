"""Which attention over the paged cache a model gets: the fastest one that computes the same.

Gathering runs anywhere and is what the others are held against: on the loaded model, over rows of
different lengths in blocks out of order, logits must be equal but for rounding. Of those that are,
`auto` takes the one whose passes were fastest, timed as they will run: recorded, where steps are.

Called while nobody owns a block, and within the memory that is planned for steps and prefill: no
pass has more positions than those, nor logits of more, but for a single row's. What a trial leaves
in the cache is cleared where it may be no number: rows read masked positions, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from time import perf_counter

import torch

from replicas.config import ReplicaConfig
from replicas.in_place import FlexInPlace, InPlace, NotInPlace, VarlenInPlace
from replicas.model import PagedModel, alike
from replicas.pair import PairRefused
from replicas.recording import record, warm_up
from replicas.windows import CacheShape, Layout, Span

AUTO, GATHER, FLEX, VARLEN = "auto", "gather", "flex", "varlen"

GAIN_LEAST = 0.02
"""Part of gathering's time that another must save: differences below it are noise."""
ROWS = (1, 8)
LENGTHS = (256, 2048)
"""Rows and KV positions of timed passes, as far as cache and context hold them."""
_VERIFY_WIDTH = 5
_DRAFT_WIDTH = 2
_FILL_WIDTH = 33
_FILL_CHUNK = 64
_SAME_LENGTH = 100
"""Positions of the longest row that is compared, at least."""
_TIMED_PASSES = 10
_TIMED_ROUNDS = 3
_WARM_UPS = 3

_log = logging.getLogger("lockstep.replica")

Make = Callable[[], InPlace]


@dataclass(frozen=True, slots=True)
class Place:
    """What trials must know of their replica."""

    blocks: int
    """Of the cache, the scrap block left out."""
    shape: CacheShape
    rows_most: int
    draft_len: int
    """Draft tokens per row, at most."""
    pass_tokens: int
    """Positions of a prefill pass, at most."""
    fixed_shapes: bool
    """Whether steps are padded to a few shapes; on a GPU they are recorded then."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the passes that steps consist of: one token, and a few to verify."""
        return tuple(dict.fromkeys((1, min(_VERIFY_WIDTH, self.draft_len + 1))))

    @property
    def checked_tokens(self) -> int:
        """Positions whose logits a step may compute."""
        return self.rows_most * (self.draft_len + 1)

    def room(self, rows: int) -> int:
        """Positions that each of so many rows can have."""
        size = self.shape.block_size
        return min(self.blocks // rows * size, self.shape.context_len)


def choose_attention(
    models: Sequence[PagedModel], config: ReplicaConfig, place: Place
) -> dict[str, str]:
    """Give target and draft the attention that the config wants; returns which, by name.

    `auto` gathers on a CPU, and where the others do not fit, fail or are slower. Raises PairRefused
    for one that was asked for by name and does not compute the same here.
    """
    roles = ("target", "draft")
    return {
        role: _chosen(model, role, config, place)
        for role, model in zip(roles, models, strict=False)
    }


def _chosen(model: PagedModel, role: str, config: ReplicaConfig, place: Place) -> str:
    wanted, device, shape = config.attention, model.device, place.shape
    if role == "draft":
        place = replace(place, draft_len=_DRAFT_WIDTH - 1)  # its steps have one token, or two
    if config.deterministic and role == "target":
        return GATHER  # it has an attention of its own
    if wanted == AUTO and (device.type != "cuda" or config.tensor_parallel > 1):
        return GATHER  # ranks that go by their own times may choose differently
    if wanted == GATHER:
        return GATHER
    makes: dict[str, Make] = {
        FLEX: lambda: FlexInPlace(place.blocks, shape.block_size, shape.context_len, device),
        VARLEN: lambda: VarlenInPlace(shape.dtype, device),
    }
    if wanted == AUTO:
        if not place.fixed_shapes:
            del makes[FLEX]  # it would compile for ever new shapes
        return quickest(model, makes, place)
    try:
        checked(model, makes[wanted], place)
    except Exception as error:  # a kernel's compiler may raise anything
        raise PairRefused(f"{role}: attention {wanted!r} is not to be had: {error}") from error
    return wanted


@torch.inference_mode()
def quickest(model: PagedModel, makes: Mapping[str, Make], place: Place) -> str:
    """Give the model the fastest of gathering and these, leave out those that fail or differ."""
    try:
        times = {GATHER: measured(model, place)}
    except Exception as error:
        # It cannot be recorded, say: it serves unrecorded, and there is nothing to compare with.
        _log.info(
            "attention: gather, whose passes cannot be timed: %s", str(error).splitlines()[:1]
        )
        model.attend(None)
        model.clear()
        return GATHER
    usable: dict[str, InPlace | None] = {GATHER: None}
    for name, make in makes.items():
        try:
            usable[name] = checked(model, make, place)
            times[name] = measured(model, place)
        except Exception as error:
            _log.info("attention: %s is left out: %s", name, str(error).splitlines()[:1])
        finally:
            model.attend(None)
            model.clear()
    chosen = fastest(times)
    model.attend(usable[chosen])
    passes = {name: [f"{1e3 * one:.2f}" for one in each] for name, each in times.items()}
    _log.info("attention: %s; milliseconds per pass: %s", chosen, passes)
    return chosen


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


# --------------------------------------------------------------------------- the same logits


@torch.inference_mode()
def checked(model: PagedModel, make: Make, place: Place) -> InPlace:
    """Give the model an attention that computes what gathering computes.

    Raises NotInPlace where logits differ by more than rounding, and what the attention raises; the
    model gathers then.
    """
    in_place = make()
    size = place.shape.block_size
    # The widest, too: a kernel may have no room for so many queries at once.
    steps = (*place.widths, _DRAFT_WIDTH, place.draft_len + 1)
    widths = list(dict.fromkeys([*steps, *([_FILL_WIDTH] if in_place.fills else [])]))
    rows = min(ROWS[-1], place.rows_most, place.blocks)
    while rows > 1 and place.room(rows) <= max(widths):
        rows -= 1
    room = place.room(rows)
    widths = [width for width in widths if width < room]
    longest = min(max(2 * size + size // 2, _SAME_LENGTH), room - max(widths))
    # From the longest to the shortest: in a row of few positions each of them counts.
    starts = [longest >> row for row in range(rows)]
    table = _table(rows, longest + max(widths), place, model.device)
    generator = torch.Generator().manual_seed(0)

    def tokens(width: int) -> torch.Tensor:
        return torch.randint(model.vocab, (rows, width), generator=generator).to(model.device)

    model.attend(None)
    chunk = max(1, min(_FILL_CHUNK, place.pass_tokens // rows))
    for begin in range(0, longest, chunk):
        width = min(chunk, longest - begin)
        window = Layout(table, [begin] * rows, width, place.shape).window(0, width)
        model.fill(tokens(width), window)
    for width in widths:
        fed = tokens(width)
        together = min(rows, max(1, place.checked_tokens // width))
        passes = []
        for row in range(0, rows, together):
            some = slice(row, row + together)
            layout = Layout(table[some], starts[some], width, place.shape)
            passes.append((fed[some], layout.window(0, width)))
        if model.packs and width > 1:
            window = Layout(table, starts, width, place.shape).window(0, width)
            cells = torch.arange(rows * width, device=model.device)
            cells = cells[cells % width <= cells // width]  # of row i its first i + 1
            passes.append((fed.view(-1)[cells][None], window.packed(cells)))
        for given, over in passes:
            expected = model.forward(given, over)
            model.attend(in_place)
            try:
                got = model.forward(given, over)
            finally:
                model.attend(None)
            if not alike(got, expected):
                raise NotInPlace(f"logits differ from gathering's, {rows} rows of width {width}")
    model.attend(in_place)
    return in_place


def _table(rows: int, length: int, place: Place, device: torch.device) -> torch.Tensor:
    """Blocks for `length` positions per row; those of a row lie apart and in reverse."""
    columns = -(-length // place.shape.block_size)
    blocks = torch.arange(1, rows * columns + 1, device=device)
    return blocks.view(columns, rows).flip(0).t().contiguous()


# --------------------------------------------------------------------------- times


@torch.inference_mode()
def measured(model: PagedModel, place: Place) -> list[float]:
    """Seconds of each pass of the two kinds of step, of few and many rows, short and long ones."""
    times = []
    for rows in dict.fromkeys(min(rows, place.rows_most) for rows in ROWS):
        room = place.room(rows) - max(place.widths)
        for length in dict.fromkeys(min(length, room) for length in LENGTHS):
            for width in place.widths if length > 0 else ():
                times.append(_seconds(_pass(model, rows, length, width, place), model, place))
    return times


def _pass(
    model: PagedModel, rows: int, length: int, width: int, place: Place
) -> Callable[[], object]:
    """A forward pass of rows that begin at `length` and up to a fifth before, as steps have it."""
    device = model.device
    table = _table(rows, length + width, place, device)
    starts = [length - (row % 4) * (length // 16) for row in range(rows)]
    if place.fixed_shapes:  # then all rows are masked, also where they are equally long
        span = Span(length, uniform=False, inside=False)
        layout = Layout(table, torch.tensor(starts, device=device), width, place.shape, span)
    else:
        layout = Layout(table, starts, width, place.shape)
    tokens = torch.zeros((rows, width), dtype=torch.int64, device=device)
    return lambda: model.forward(tokens, layout.window(0, width))


def _seconds(run: Callable[[], object], model: PagedModel, place: Place) -> float:
    """Of one pass: the best of a few rounds of several."""
    device = model.device
    if place.fixed_shapes and device.type == "cuda":
        warm_up(run, device, _WARM_UPS)
        graph, _ = record(run, device)
        run = graph.replay
    for _ in range(_WARM_UPS):
        run()
    best = float("inf")
    for _ in range(_TIMED_ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = perf_counter()
        for _ in range(_TIMED_PASSES):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (perf_counter() - start) / _TIMED_PASSES)
    return best
