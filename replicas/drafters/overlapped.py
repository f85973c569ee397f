"""A drafter on a device of its own, which drafts one batch while the target checks another.

Two batches take turns, as in MineDraft (arXiv 2603.18016). One thread owns the drafter: every call
runs there, one after the other, and its caller waits for it, but for a draft ahead. What a draft
ahead reads, the tokens and the block tables of its rows, no other batch holds. What it writes lies
in the drafter's cache behind what is valid there, as the writes of a draft that is rejected do. So
one that is not used, because its rows have ended or were rolled back, is forgotten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters.protocol import (
    Drafter,
    DraftRequest,
    DraftSource,
    Observation,
    Proposal,
    SourceAround,
)
from replicas.errors import PairRefused, TooLittleMemory
from replicas.memory import DraftMemory, MemoryPlan, free_bytes, in_mib
from replicas.models import dtype_of, may_be_gpu, resolve_device
from replicas.stopwatch import Stopwatch

FIELD = "speculative_config.draft_device"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Draft:
    proposal: Proposal
    """On the host."""
    lengths: list[int]
    """Of the rows' contents."""
    asked: Sequence[int]
    """Draft tokens wanted per row."""
    spent_s: dict[str, float]
    """By section of the stopwatch."""


class OverlappedDrafter:
    """See the module."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, make: Callable[[], Drafter], device: torch.device) -> None:
        """`make` builds a drafter without auxiliary layers on the device."""
        self.device = device
        self._thread = ThreadPoolExecutor(1, "lockstep-drafter", partial(_use, device))
        try:
            self._drafter = self._run(make)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        assert not self._drafter.aux_layers, "hidden states are on the target's device"
        self.name = self._drafter.name
        self._ahead: dict[tuple[str, ...], Future[_Draft]] = {}
        """Drafts ahead by their rows, in the order in which the batches run."""
        self._lock = Lock()
        """Of `_ahead` and of the order in which the thread is given drafts."""

    def draft_ahead(self, request: DraftRequest) -> None:
        rows = tuple(request.ids)
        self._forget(rows)
        with self._lock:
            self._ahead[rows] = self._thread.submit(_inferring, self._draft, request)

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        begun_s = perf_counter()
        ahead = self._taken(tuple(request.ids))
        draft = None if ahead is None else ahead.result()
        lengths = [len(content) for content in request.contents]
        if draft is None or (draft.lengths, draft.asked) != (lengths, list(request.draft_lens)):
            begun_s = perf_counter()
            ahead, draft = None, self._run(self._draft, _moved(request, self.device))
        for section, spent_s in draft.spent_s.items():
            watch.add(section, spent_s)
        if ahead is not None:
            waited_s = perf_counter() - begun_s
            watch.add("hidden", sum(draft.spent_s.values()) - waited_s)
        tokens = draft.proposal.tokens.to(request.table.device)
        return Proposal(tokens, draft.proposal.lens)

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None:
        self._run(self._drafter.begin, row, tokens, salt, prefilled)

    def end(self, row: str) -> None:
        self._forget([row])
        self._run(self._drafter.end, row)

    def observe(self, observed: Observation) -> None:
        self._run(self._drafter.observe, _moved(observed, self.device))

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        self._forget(rows)
        self._run(self._drafter.rollback, rows, lengths)

    def valid(self, row: str) -> int | None:
        return self._run(self._drafter.valid, row)

    def _run(self, call: Callable[..., _T], *args: Any) -> _T:
        """On the drafter's thread, after what that was given before. The worker's bound on a
        batch's time is the bound on this wait, as it is on any pass."""
        return self._thread.submit(_inferring, call, *args).result()

    def _draft(self, request: DraftRequest) -> _Draft:
        watch = Stopwatch(self.device)
        proposal = self._drafter.propose(request, watch)
        # Through the host: it waits for this device here, and makes no other device wait.
        proposal = Proposal(proposal.tokens.cpu(), proposal.lens)
        spent_s = {section: watch.seconds(section) for section in ("draft", "catch_up")}
        lengths = [len(content) for content in request.contents]
        return _Draft(proposal, lengths, list(request.draft_lens), spent_s)

    def _taken(self, rows: tuple[str, ...]) -> Future[_Draft] | None:
        """The draft ahead of these rows. Batches run in order, so those before it are of batches
        that never came to it."""
        with self._lock:
            if rows not in self._ahead:
                return None
            while True:
                first = next(iter(self._ahead))
                ahead = self._ahead.pop(first)
                if first == rows:
                    return ahead
                ahead.cancel()

    def _forget(self, rows: Iterable[str]) -> None:
        with self._lock:
            for held in [held for held in self._ahead if not set(held).isdisjoint(rows)]:
                self._ahead.pop(held).cancel()


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # recordings and timing events are made on the current one


def _inferring(call: Callable[..., _T], *args: Any) -> _T:
    """Torch's modes are of a thread."""
    with torch.inference_mode():
        return call(*args)


def _moved(value: _T, device: torch.device) -> _T:
    """A dataclass with its tensors, and those of dataclasses in it, on the device."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        part = getattr(value, field.name)
        if isinstance(part, torch.Tensor):
            changed[field.name] = part.to(device)
        elif dataclasses.is_dataclass(part):
            changed[field.name] = _moved(part, device)
    return dataclasses.replace(value, **changed)  # type: ignore[type-var]


@dataclass(frozen=True)
class OverlappedSource(SourceAround):
    apart: bool
    """Whether its memory is not the target's."""
    device: torch.device | None = None
    """None before its weights are read."""

    @classmethod
    def of(cls, other: DraftSource, config: ReplicaConfig) -> OverlappedSource:
        return cls(other, config.drafting.draft_device != "cpu" or may_be_gpu(config.device))

    @property
    def memory(self) -> DraftMemory:
        if not self.apart:
            return self.other.memory
        return dataclasses.replace(self.other.memory, weights=0, apart=True)

    def load(self, config: ReplicaConfig, device: torch.device) -> OverlappedSource:
        own = _own_device(config, device)
        return OverlappedSource(self.other.load(config, own), self.apart, own)

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        assert self.device is not None, "its weights are not read"
        if self.device.type == "cuda":
            self._check_memory(config, plan, self.device)
        make = partial(self.other.drafter, target, config, plan)
        return OverlappedDrafter(make, self.device)

    def _check_memory(self, config: ReplicaConfig, plan: MemoryPlan, device: torch.device) -> None:
        """Raise TooLittleMemory where its cache does not fit beside its weights: that has as many
        blocks as the target's."""
        model = self.other.memory.model
        assert model is not None
        position = model.kv_numbers * dtype_of(config).itemsize
        needed, free = (plan.cache_blocks + 1) * config.block_size * position, free_bytes(device)
        if needed > free:
            raise TooLittleMemory(
                f"{FIELD}: the cache of {plan.cache_blocks} blocks takes {in_mib(needed)}, but"
                f" {in_mib(free)} are free on {device}; num_gpu_blocks_override makes it smaller",
                needed,
            )


def _own_device(config: ReplicaConfig, target: torch.device) -> torch.device:
    """As the setting names it; a GPU without a number is the one after the target's. Raises
    PairRefused."""
    name = config.drafting.draft_device
    assert name is not None
    own = resolve_device(name)
    if name == "cuda" and target.type == "cuda":
        number = (target.index + 1) % torch.cuda.device_count()
        own = torch.device("cuda", number)
    if own.type == "cuda" and own == target:
        raise PairRefused(f"{FIELD}: {own} is the target's device; the draft model needs another")
    return own
