"""Work of a GPU recorded as CUDA graphs: replaying one is a single launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


def warm_up(run: Callable[[], object], device: torch.device, times: int) -> None:
    """Run what is to be recorded: libraries allocate and choose kernels in the first runs."""
    stream = recording_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            for _ in range(times):
                run()
    finally:
        # Also of a run that raised: what it has launched writes to what is used next.
        torch.cuda.current_stream(device).wait_stream(stream)


def record(
    run: Callable[[], _T], device: torch.device, graph_pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, _T]:
    """A graph of what `run` launches, and its result, whose tensors each replay overwrites. They
    are allocated in `graph_pool`, None being one of their own.

    Raises what `run` or the recording raises; this thread's stream is then as it was. torch leaves
    its own current where a recording cannot be ended, and all that follows would run there.
    """
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream(device)
    graph_pool = graph_pool or torch.cuda.graph_pool_handle()
    _forget_workspaces()
    try:
        with torch.cuda.graph(graph, pool=graph_pool, stream=recording_stream(device)):
            result = run()
    except BaseException:
        torch.cuda.set_stream(before)
        _leave(graph_pool, device)
        raise
    finally:
        _forget_workspaces()
    return graph, result


@cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: torch keeps a workspace of cuBLAS's, 32 MiB on Hopper, for every stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _leave(graph_pool: Any, device: torch.device) -> None:
    """Have the allocator take nothing from this memory any more: torch before 2.13 goes on with it
    after a recording that could not be ended, and later ones are refused."""
    with suppress(RuntimeError):  # it has ended already
        torch._C._cuda_endAllocateToPool(device.index, graph_pool)


def _forget_workspaces() -> None:
    """Have cuBLAS's workspaces allocated anew.

    A recording holds its workspace's address, and torch does not know: torch 2.13 frees a stream's
    workspace as soon as any recording made there is destroyed, under all others (its issue 193402).
    Forgotten before and after, it is part of their memory, which lives as long as they do.
    """
    torch._C._cuda_clearCublasWorkspaces()
