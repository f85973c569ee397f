"""Modes of a replica on one device, in turn: each replica is made, measured and freed.

A device may hold one pair and one replica of it and no more, so nothing outlives its mode but
figures. A mode that fails is told, with its message, and costs no other mode anything.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from benchmarks.device_runs import Bench
from replicas.config import ReplicaConfig
from replicas.models.attention.paged import FlexAttention, NotPaged, VarlenAttention
from replicas.models.pair import Pair
from replicas.replica import Replica

WAITING, MEASURED, LEFT_OUT, FAILED = "waiting", "measured", "left out", "failed"
"""States of a mode; `left out` is what torch, the device or an option does not offer here."""

BLOCK_SIZE = 16
"""Of all modes that do not say otherwise."""
ATTENTIONS = {
    "gather": ("gather", BLOCK_SIZE),
    "flex": ("flex", BLOCK_SIZE),
    "flex-128": ("flex", 128),
    "varlen-256": ("varlen", 256),
}
"""Modes that differ in the attention alone: its kind and KV positions per block."""
USUAL, EAGER, DETERMINISTIC = "plain", "eager", "deterministic"
ALONE = (USUAL, DETERMINISTIC)
"""Modes whose requests run alone as well: the one that promises equality, and the same without."""

UNRECORDED = "a pass runs unrecorded"
"""How the warning begins that a replica gives then."""
_MESSAGE_MOST = 300
"""Characters: a compiler's messages go on for pages."""


@dataclass
class Outcome:
    """What has become of a mode."""

    state: str = WAITING
    message: str = ""
    """Why it failed or was left out, in one line."""
    attention: str = ""
    """Of the target."""
    unrecorded: list[str] = field(default_factory=list)
    """Steps of which a CUDA graph was to be made and could not: each warning once."""
    memory_gb: float | None = None
    """Of a GPU, the most that torch had taken at any time in this mode, weights included."""

    def end(self, error: Exception | None = None) -> None:
        """It was measured, or this is why it was not."""
        self.state = MEASURED
        if error is not None:
            self.state = LEFT_OUT if isinstance(error, NotPaged) else FAILED
            self.message = one_line(error)


@dataclass(frozen=True)
class Plan:
    """What is measured in each mode."""

    batches: Sequence[int]
    draft_lens: Sequence[int]
    """Of the usual mode; the others draft as far as the middle one."""
    draft_batch_max: int
    """No speculation above it."""
    rounds: int
    """After one that warms up."""
    alone: int
    """Requests that run alone in the modes of ALONE."""

    def runs(self, mode: str) -> list[tuple[int, int]]:
        """Batch size and draft length of the runs of a round."""
        lens = (
            self.draft_lens if mode == USUAL else self.draft_lens[len(self.draft_lens) // 2 :][:1]
        )
        return [
            (batch, draft_len)
            for batch in self.batches
            for draft_len in (0, *(lens if batch <= self.draft_batch_max else ()))
        ]


def one_line(error: Warning | Exception | str) -> str:
    """What it says; what kind it is, where it is an error."""
    text = " ".join(str(error).split())
    if isinstance(error, Exception) and not isinstance(error, Warning):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _MESSAGE_MOST else f"{text[: _MESSAGE_MOST - 4]} ..."


def made(pair: Pair, config: ReplicaConfig) -> Replica:
    """A replica. Raises NotPaged where its attention is not offered here, which is no failure,
    and PairRefused for one that is offered and fails or differs."""
    if config.attention == "flex":
        FlexAttention(config.kv_blocks or 0, config.block_size, pair.context_len, pair.device)
    elif config.attention == "varlen":
        VarlenAttention(pair.dtype, pair.device)
    return Replica(pair, config)


def measure(
    mode: str,
    replica: Replica,
    bench: Bench,
    plan: Plan,
    beside: Sequence[Callable[[], None]],
    noted: Callable[[], None],
) -> None:
    """All runs of the mode, and `beside`, in each round; `noted` is called after it.

    What is compared by ratio alternates within a round, on the same replica. If it raises, `bench`
    has what the rounds had that were to be timed.
    """
    for round_ in range(plan.rounds + 1):
        try:
            for batch, draft_len in plan.runs(mode):
                bench.lockstep(mode, replica, batch, draft_len)
            for run in beside:
                run()
        finally:
            if round_ == 0:
                bench.forget()
        noted()
    if mode in ALONE:
        bench.alone(mode, replica, plan.alone)


def attempt(
    mode: str,
    outcome: Outcome,
    device: torch.device,
    make: Callable[[], Replica],
    bench: Bench,
    plan: Plan,
    beside: Sequence[Callable[[], None]] = (),
    noted: Callable[[], None] = lambda: None,
) -> None:
    """Make a mode's replica, measure it, free it; `outcome` says what became of it. No other
    replica may be held meanwhile."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)

    def run() -> None:  # apart, so that the replica is gone when it returns
        replica = make()
        outcome.attention = replica.spec.attention
        measure(mode, replica, bench, plan, beside, noted)

    try:
        with unrecorded_steps(outcome.unrecorded):
            run()
        outcome.end()
    except Exception as error:  # a kernel or its compiler may raise anything
        outcome.end(error)
        print(f"{mode}: {outcome.state}: {outcome.message}", flush=True)
    if on_gpu:
        outcome.memory_gb = torch.cuda.max_memory_reserved(device) / 1e9
    free(device)


def free(device: torch.device) -> None:
    """Give the device what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        # A device that an error has broken refuses this, too; the next mode will say so.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


@contextmanager
def unrecorded_steps(found: list[str]) -> Iterator[None]:
    """Collect what replicas warn of steps that run unrecorded; show all at the end."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.filterwarnings("always", UNRECORDED)
        try:
            yield
        finally:
            texts = dict.fromkeys(one_line(each.message) for each in shown)
            found += [text for text in texts if text.startswith(UNRECORDED)]
            print("\n".join(texts), file=sys.stderr, flush=True)
