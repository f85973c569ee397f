"""Work of a GPU recorded as CUDA graphs: replaying one is a single launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


def warm_up(run: Callable[[], object], device: torch.device, times: int) -> None:
    """Run what is to be recorded: libraries allocate and choose kernels in the first runs."""
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(times):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)


def record(
    run: Callable[[], _T], device: torch.device, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, _T]:
    """A graph of what `run` launches, and its result, whose tensors each replay overwrites. They
    are allocated in `pool`, None being one of their own.

    Raises what `run` or the recording raises; this thread's stream is then as it was. torch leaves
    its own current where a recording cannot be ended, and all that follows would run there.
    """
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool, stream=_stream(device)):
            result = run()
    except BaseException:
        torch.cuda.set_stream(before)
        raise
    return graph, result


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: cuBLAS keeps a workspace, 32 MiB on Hopper, for every stream that it has seen,
    and one that was first allocated within a recording would stay in that recording's pool."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
