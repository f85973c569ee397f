"""Proves that recordings share no memory with what runs beside them, nor a stream if they fail.

Recording itself needs a GPU. What torch does around it is torch's own here; streams and what
records stand for CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from replicas.cuda import record, recording_stream, warm_up

GPU = torch.device("cuda", 0)


class Recorder:
    """CUDA's streams, graphs and memory, as far as a recording asks for them."""

    def __init__(self) -> None:
        self.current: object = Stream(self)
        self.made = 0
        self.waited: list[tuple[object, object]] = []
        self.recorded_on: list[object] = []
        self.pools: list[object] = []
        self.pool: object = None
        """That of the recording that is being made."""
        self.workspaces: dict[object, object] = {}
        """By stream, what cuBLAS's workspace belongs to."""
        self.spoilt = False
        self.left: list[object] = []
        """Pools that the allocator was told to leave."""

    def end(self, device: int, pool: object) -> None:
        self.left.append(pool)
        raise RuntimeError("not currently recording to this pool")

    def multiply(self) -> object:
        """As cuBLAS does: where its workspace belongs, allocated if the stream has none."""
        return self.workspaces.setdefault(self.current, self.pool or "everything")

    def stream(self, device: torch.device) -> object:
        self.made += 1
        return Stream(self)

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def leave(self, stream: object) -> None:
        self.current = stream


class Stream:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def wait_stream(self, other: object) -> None:
        self._recorder.waited.append((self, other))


class Graph:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def capture_begin(self, pool: object = None, **_: object) -> None:
        self._recorder.recorded_on.append(self._recorder.current)
        self._recorder.pools.append(pool)
        self._recorder.pool = pool

    def capture_end(self) -> None:
        self._recorder.pool = None
        if self._recorder.spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder()
    for name, stand_in in {
        "Stream": made.stream,
        "current_stream": lambda device: made.current,
        "set_stream": made.leave,
        "stream": made.on,
        "CUDAGraph": lambda: Graph(made),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: f"pool {len(made.pools)}",
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    forget = made.workspaces.clear
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", forget, raising=False)
    recording_stream.cache_clear()
    yield made
    recording_stream.cache_clear()


def test_all_recordings_are_made_on_one_stream_that_has_been_warmed_up(recorder: Recorder) -> None:
    """Torch keeps a workspace of cuBLAS's for every stream."""
    ran: list[object] = []
    before = recorder.current
    for pool in ("one", "two"):
        warm_up(lambda: ran.append(recorder.current), GPU, 2)
        assert recorder.current is before
        _, result = record(lambda: ran.append(recorder.current) or 7, GPU, pool)
        assert result == 7
        assert recorder.current is before
    assert recorder.made == 1
    assert len(ran) == 6
    assert {*ran, *recorder.recorded_on} == {recording_stream(GPU)}
    assert recorder.pools == ["one", "two"]
    # Before its runs it waits for what was launched, and after them that waits for it.
    own = recording_stream(GPU)
    assert recorder.waited == [(own, before), (before, own)] * 2


def test_a_workspace_of_cublas_is_part_of_the_recordings_pool(recorder: Recorder) -> None:
    """Destroying another recording, or running something else, leaves it alone."""
    for pool in ("one", "two", "two"):
        warm_up(lambda: recorder.multiply() == "everything" or refuse(), GPU, 1)
        _, workspace = record(recorder.multiply, GPU, pool)
        assert workspace == pool
    recorder.spoilt = True
    with pytest.raises(RuntimeError):
        record(recorder.multiply, GPU, "three")
    assert "three" not in recorder.workspaces.values()


def test_who_runs_after_a_warm_up_that_failed_waits_for_what_it_launched(
    recorder: Recorder,
) -> None:
    before = recorder.current
    with pytest.raises(ValueError, match="no kernel"):
        warm_up(refuse, GPU, 1)
    assert recorder.waited[-1] == (before, recording_stream(GPU))


def refuse() -> None:
    raise ValueError("no kernel for this shape")


@pytest.mark.parametrize(
    ("run", "spoilt", "raised"),
    [(refuse, False, ValueError), (refuse, True, RuntimeError), (list, True, RuntimeError)],
)
def test_after_a_recording_that_fails_all_runs_where_it_ran(
    run: Callable[[], object], spoilt: bool, raised: type[Exception], recorder: Recorder
) -> None:
    before = recorder.current
    recorder.spoilt = spoilt
    with pytest.raises(raised):
        record(run, GPU)
    assert recorder.current is before
    assert recorder.left == recorder.pools != []
    recorder.spoilt = False
    record(list, GPU)
    assert recorder.current is before
