"""Forward passes of a few fixed shapes: on a GPU each is recorded at load, then replayed.

At decode sizes a GPU waits for the interpreter to launch kernels; a recorded pass is one launch. A
recording holds addresses and shapes, so rows, tokens per row and KV positions are padded to a few
buckets and inputs are copied into standing tensors. Rows that only pad lie in the scrap block, and
columns beyond a row's blocks are masked. Only forward passes are recorded: choosing tokens is not,
so what requests ask of it multiplies no recordings. A pass outside of all buckets runs as it is;
nothing is recorded within a request. What cannot be recorded ends the load: a replica several times
slower than its like would be no help.

Tests run the same passes on a CPU, padded, through the same tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch

from replicas.errors import PairRefused
from replicas.kv_cache import SCRAP_BLOCK, DevicePassLayout, DeviceStepLayout
from replicas.models import ALL, BatchLayout, ForwardOptions, Model, Output

KV_SHARES = (16, 4, 1)
"""Buckets of KV positions: the context divided by each."""
_WARM_UPS = 2


@dataclass(frozen=True, order=True, slots=True)
class Kind:
    """All that fixes the kernels of a pass."""

    rows: int
    width: int
    """Tokens per row."""
    blocks: int


def buckets(most: int) -> list[int]:
    """1, 2, 4, 8, ... and the most itself."""
    sizes = []
    size = 1
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, most]


class GraphedModel:
    """A model on a device whose steps run in a few shapes."""

    def __init__(
        self,
        model: Model,
        rows_most: int,
        widths: list[int],
        aux_layers: tuple[int, ...] = (),
        hidden_size: int = 0,
    ) -> None:
        """Records now, on rows that all lie in the scrap block; `widths` are tokens per row,
        `hidden_size` the numbers per token of what a head takes beside tokens. Raises
        PairRefused."""
        shape = model.backend.cache.shape
        self.backend, self.device, self.vocab = model.backend, model.device, model.vocab
        self.model = model
        self.aux_layers = aux_layers
        blocks = sorted({-(-shape.context_len // share // shape.block_size) for share in KV_SHARES})
        # A step's last tokens may lie beyond the context: their columns are there.
        beyond = -(-max(widths) // shape.block_size)
        self.passes: dict[Kind, FixedPass] = {}
        """All that there ever are."""
        graph_pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        # From the largest to the smallest: what it takes serves all others.
        kinds = product(buckets(rows_most), sorted(set(widths)), [most + beyond for most in blocks])
        with _no_garbage_collected():
            for kind in sorted((Kind(*sizes) for sizes in kinds), reverse=True):
                self.passes[kind] = FixedPass(model, kind, aux_layers, graph_pool, hidden_size)
        self._kinds = sorted(self.passes)

    def forward(
        self,
        tokens: torch.Tensor,  # [tokens], int64
        layout: BatchLayout,
        options: ForwardOptions = ALL,
        *hidden: torch.Tensor,  # [tokens, hidden_size], of a head
    ) -> Output:
        """As the model's own; the result is valid until the next pass."""
        kind = self._kind(layout, options)
        if kind is None:
            return self.model.forward(tokens, layout, options, *hidden)
        assert isinstance(layout, DevicePassLayout)
        out = self.passes[kind].run(tokens, layout, *hidden)
        assert out.logits is not None
        logits = _cut(out.logits, kind, layout)
        if isinstance(options.logits, torch.Tensor):
            logits = logits.index_select(0, options.logits)
        return Output(logits, [_cut(hidden, kind, layout) for hidden in out.aux_hidden_states])

    def _kind(self, layout: BatchLayout, options: ForwardOptions) -> Kind | None:
        """The smallest kind that holds the pass; None: it runs as it is."""
        if not isinstance(layout, DevicePassLayout) or layout.cells is not None:
            return None
        if options.logits is False or options.aux_layers != self.aux_layers:
            return None
        blocks = -(-layout.reach // layout.shape.block_size)
        for kind in self._kinds:
            if kind.rows >= layout.rows and kind.width >= layout.width and kind.blocks >= blocks:
                return kind
        return None


class FixedPass:
    """One kind of pass over standing tensors."""

    def __init__(
        self,
        model: Model,
        kind: Kind,
        aux_layers: tuple[int, ...],
        graph_pool: Any,
        hidden_size: int = 0,
    ) -> None:
        device, shape = model.device, model.backend.cache.shape
        self._kind = kind
        self._tokens = torch.zeros((kind.rows, kind.width), dtype=torch.int64, device=device)
        self._starts = torch.zeros(kind.rows, dtype=torch.int64, device=device)
        groups = len(model.backend.cache.groups)
        sizes = (kind.rows, kind.blocks) if groups == 1 else (kind.rows, groups, kind.blocks)
        self._table = torch.full(sizes, SCRAP_BLOCK, device=device)
        self._hidden: list[torch.Tensor] = []
        if hidden_size:
            cells = kind.rows, kind.width, hidden_size
            self._hidden = [torch.zeros(cells, dtype=model.backend.cache.dtype, device=device)]
        self._held: torch.Tensor | None = None
        """Whose table the standing one holds: mostly that of all passes of a batch."""
        self._graph: Any = None
        reach = kind.blocks * shape.block_size

        def run() -> Output:
            layout = DeviceStepLayout(self._table, self._starts, kind.width, shape, reach)
            window = layout.window(0, kind.width)
            options = ForwardOptions(aux_layers=aux_layers)
            hidden = [states.flatten(0, 1) for states in self._hidden]
            return model.forward(self._tokens.reshape(-1), window, options, *hidden)

        self.compute = run
        """What is recorded: the pass on its standing tensors."""
        if device.type == "cuda":
            try:
                with torch.inference_mode():
                    self._graph, self._out = record(run, device, graph_pool)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise PairRefused(f"graphs: {kind} cannot be recorded: {error}") from error

    def run(
        self,
        tokens: torch.Tensor,  # [window's rows * width], int64
        window: DevicePassLayout,
        *hidden: torch.Tensor,  # each [window's rows * width, width of the states]
    ) -> Output:
        """The pass over these tokens, in the recorded shape: the output has all of its rows and
        columns, and on a GPU the next run overwrites it."""
        rows, width = window.rows, window.width
        for standing, given in zip(self._hidden, hidden, strict=True):
            standing[:rows, :width] = given.view(rows, width, -1)
        self._tokens.zero_()
        self._tokens[:rows, :width] = tokens.view(rows, width)
        self._starts.zero_()
        self._starts[:rows] = window.starts
        if self._held is not window.table:
            columns = min(window.table.shape[-1], self._kind.blocks)
            self._table.fill_(SCRAP_BLOCK)
            self._table[:rows, ..., :columns] = window.table[..., :columns]
            self._held = window.table
        if self._graph is None:
            return self.compute()
        self._graph.replay()
        return self._out


def _cut(x: torch.Tensor, kind: Kind, window: DevicePassLayout) -> torch.Tensor:
    """What the pass's own tokens have, [tokens, ...], of all that was computed."""
    grid = x.view(kind.rows, kind.width, *x.shape[1:])
    return grid[: window.rows, : window.width].flatten(0, 1)


def record(
    run: Callable[[], Output], device: torch.device, graph_pool: Any
) -> tuple[torch.cuda.CUDAGraph, Output]:
    """A graph of what `run` launches, and its result, whose tensors each replay overwrites.

    cuBLAS's workspaces are allocated anew: a recording holds its workspace's address, and torch
    does not know. torch 2.13 frees a stream's workspace as soon as any recording made there is
    destroyed, under all others (its issue 193402). Forgotten before and after, it is part of their
    memory, which lives as long as they do.
    """
    stream, graph = _recording_stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):  # libraries allocate and choose kernels in the first runs
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch._C._cuda_clearCublasWorkspaces()
    # What other threads do to the device meanwhile spoils nothing.
    mode = "thread_local"
    with torch.cuda.graph(graph, pool=graph_pool, stream=stream, capture_error_mode=mode):
        result = run()
    torch._C._cuda_clearCublasWorkspaces()
    return graph, result


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: torch keeps a workspace of cuBLAS's, 32 MiB on Hopper, for every stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Recordings of an earlier replica that are destroyed during one spoil it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
