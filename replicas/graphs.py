"""Steps of a few fixed shapes: on a GPU each is recorded once as CUDA graphs, then replayed.

At decode sizes a GPU waits for the interpreter to launch kernels; a recorded step is two launches.
A recording holds addresses and shapes, so rows, draft length and table columns are padded to
buckets and all inputs are copied into standing buffers. Rows that only pad lie in the scrap block,
draft tokens beyond a row's own draft length are never accepted, columns beyond its blocks are
masked: what a row commits is what it would commit in a step of its exact shape. Where fewer draft
tokens are verified than drafted, their number is rounded up, too: a row may commit more then.

On the CPU the same steps run eagerly through the same buffers, which is how they are tested; it
gains nothing there. Draft and verification are recorded apart, so that their times are known.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replicas.eqspec import Group, Inputs, Outcome, Proposal, check, propose, read_back, state_of
from replicas.model import PagedModel
from replicas.parts import positions_in_place
from replicas.recording import record, reserve, warm_up
from replicas.sampling import SamplingBatch
from replicas.stopwatch import Stopwatch
from replicas.upload import on_host
from replicas.windows import SCRAP_BLOCK, CacheShape, Span

_WARM_UPS = 2
"""Runs before a recording."""
_IDLE_LENGTH = 2
"""Tokens of content that a row which only pads passes for: its first position is 0."""


def bucket(n: int, most: int | None) -> int:
    """The smallest of 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds n, or `most` before it."""
    if n <= 2:
        return n
    power = 1 << (n - 1).bit_length()
    fits = power if n > power // 4 * 3 else power // 4 * 3
    return fits if most is None else max(n, min(fits, most))


def verify_bucket(asked: int, cells: int) -> int | None:
    """The eighth of a step's `cells` (rows x k) that holds `asked` draft tokens; None: all.

    Eighths of the cells rather than buckets of its own: what schedulers ask for are shares of them,
    and to check a few more than asked changes no token.
    """
    eighths = -(-8 * asked // cells) if cells else 8
    return None if eighths >= 8 else -(-eighths * cells // 8)


@dataclass(frozen=True, slots=True)
class Limits:
    """What memory was planned for. Only a step that is larger itself has a larger bucket."""

    rows: int
    draft_len: int
    context_len: int


@dataclass(frozen=True, slots=True)
class StepKind:
    """All that fixes the kernels of a step."""

    rows: int
    k: int
    blocks: int
    verify_tokens: int | None
    sampling: tuple[bool, int, bool, bool]

    def positions_read(self, lengths: Sequence[int], block_size: int, unit: int | None) -> int:
        """KV positions that the target reads in such a step, over rows with so many tokens of
        content: padding included, all of the table where it gathers (`unit` is None), and in place
        whole units of each row."""
        if unit is None:
            return self.rows * self.blocks * block_size
        idle = [_IDLE_LENGTH] * (self.rows - len(lengths))
        return positions_in_place((length + self.k for length in (*lengths, *idle)), unit)


class StepRunner:
    """Runs steps by their kind; keeps the `most` kinds that were used last."""

    def __init__(
        self,
        target: PagedModel,
        draft: PagedModel | None,
        shape: CacheShape,
        limits: Limits,
        most: int,
        pool_bytes: int = 1,
    ) -> None:
        """`pool_bytes`: what the largest step takes, set aside on a GPU; see `Buffers.pool`."""
        self._target = target
        self._draft = draft
        self._shape = shape
        self._limits = limits
        self._most = most
        self._kept: OrderedDict[StepKind, FixedStep] = OrderedDict()
        self._pool_bytes = pool_bytes
        self._pool: Any = None
        self._reserve: torch.cuda.CUDAGraph | None = None

    @property
    def kinds(self) -> tuple[StepKind, ...]:
        """Those that are kept, the last used at the end."""
        return tuple(self._kept)

    def positions_read(self, lengths: Sequence[int], unit: int | None) -> int:
        """Of the last step; see `StepKind.positions_read`."""
        kind = next(reversed(self._kept))
        return kind.positions_read(lengths, self._shape.block_size, unit)

    def step(self, group: Group, watch: Stopwatch) -> Outcome:
        """As `eqspec.step`, for a group with a static SamplingBatch."""
        kind = self._kind(group)
        fixed = self._kept.pop(kind, None)
        if fixed is None:
            if len(self._kept) >= self._most:
                self._kept.popitem(last=False)
            device = group.table.device
            if device.type == "cuda":
                self._open_pool(device)
            fixed = FixedStep(self._target, self._draft, self._shape, kind, device, self._pool)
        self._kept[kind] = fixed
        # One transfer, the step's only synchronisation.
        return read_back(group, fixed.run(group, watch))

    def _open_pool(self, device: torch.device) -> None:
        """Where there is none, or none that is open: with no recording left in it a pool is closed
        for good."""
        if self._reserve is not None or any(one.recorded for one in self._kept.values()):
            return
        self._pool = torch.cuda.graph_pool_handle()
        try:
            self._reserve = reserve(self._pool_bytes, device, self._pool)
        except RuntimeError as error:
            warnings.warn(f"nothing is set aside for recorded steps: {error}", stacklevel=3)
            self._pool = torch.cuda.graph_pool_handle()

    def _kind(self, group: Group) -> StepKind:
        limits = self._limits
        block_size = self._shape.block_size
        rows = bucket(len(group.contents), limits.rows)
        k = bucket(max(group.draft_lens), limits.draft_len)
        longest = max(map(len, group.contents))
        most = -(-(limits.context_len + k) // block_size)
        asked = group.verify_tokens
        return StepKind(
            rows=rows,
            k=k,
            blocks=bucket(-(-(longest + k) // block_size), most),
            verify_tokens=None
            if asked is None
            else verify_bucket(min(asked, sum(group.draft_lens)), rows * k),
            sampling=group.sampling.kind,
        )


class FixedStep:
    """One kind of step over standing buffers."""

    def __init__(
        self,
        target: PagedModel,
        draft: PagedModel | None,
        shape: CacheShape,
        kind: StepKind,
        device: torch.device,
        pool: Any,
    ) -> None:
        """On a GPU it is recorded now, on rows that all lie in the scrap block, and shares the
        memory `pool` with others: only one runs at a time."""
        self._target = target
        self._draft = draft
        self._shape = shape
        length = kind.blocks * shape.block_size
        self._inputs = Inputs(
            state=torch.zeros((4 + kind.k, kind.rows), dtype=torch.int64, device=device),
            table=torch.full((kind.rows, kind.blocks), SCRAP_BLOCK, device=device),
            sampling=SamplingBatch.standing(kind.sampling, kind.rows, device),
            k=kind.k,
            verify_tokens=kind.verify_tokens,
            # The last window ends where the table does, whatever the rows' lengths.
            span=Span(longest=length - kind.k - 2, uniform=False, inside=False),
        )
        self._filled: tuple[torch.Tensor, SamplingBatch] | None = None
        """Whose table and parameters the standing tensors hold: mostly those of all of a batch."""
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        if device.type == "cuda":
            try:
                self._record(pool)
            except RuntimeError as error:
                warnings.warn(f"a step runs unrecorded: {kind}: {error}", stacklevel=2)

    @property
    def recorded(self) -> bool:
        return self._graphs is not None

    def run(self, group: Group, watch: Stopwatch) -> torch.Tensor:  # [2 + 2 * k, rows], int64
        """The joined verdict, padding rows at the end; valid until the next run."""
        self._fill(group)
        if self._graphs is None:
            proposal = self._propose(watch)
            return check(self._target, self._inputs, proposal, watch).joined()
        for part, graph in zip(("draft", "verify"), self._graphs, strict=True):
            with watch.section(part):
                graph.replay()
        return self._out

    def _fill(self, group: Group) -> None:
        inputs = self._inputs
        rows, columns = inputs.table.shape
        padding = [0] * (rows - len(group.contents))
        state = [line + padding for line in state_of(group, inputs.k)]
        inputs.state.copy_(on_host(state, torch.int64, inputs.state.device), non_blocking=True)
        held = self._filled or (None, None)
        self._filled = None
        if held[0] is not group.table:
            table = group.table[:, :columns]
            inputs.table.fill_(SCRAP_BLOCK)
            inputs.table[: table.shape[0], : table.shape[1]] = table
        if held[1] is not group.sampling:
            inputs.sampling.overwrite(group.sampling)
        self._filled = (group.table, group.sampling)

    def _propose(self, watch: Stopwatch) -> Proposal:
        return propose(self._target, self._draft, self._inputs, self._shape, watch)

    def _record(self, pool: Any) -> None:
        untimed = Stopwatch(torch.device("cpu"))  # events within a recording cannot be timed
        device = self._inputs.state.device

        def step() -> torch.Tensor:
            return check(self._target, self._inputs, self._propose(untimed), untimed).joined()

        warm_up(step, device, _WARM_UPS)
        # One is replayed right after the other, so what the first leaves for the second may be
        # overwritten by other kinds of step afterwards.
        drafting, proposal = record(lambda: self._propose(untimed), device, pool)
        verifying, self._out = record(
            lambda: check(self._target, self._inputs, proposal, untimed).joined(), device, pool
        )
        self._graphs = (drafting, verifying)
