"""How a replica's memory is divided: weights, buffers of the largest batches, KV blocks.

All models' caches share the blocks, so a block costs all of them. What there is less the weights
goes to the buffers first; KV blocks get the rest. Where that is too little, the wanted batches
shrink.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from replicas.config import ReplicaConfig
from replicas.errors import TooLittleMemory
from replicas.invariant import can_prepack
from replicas.kv_cache import BlockGroups, counted
from replicas.memory.buffers import (
    Buffers,
    MeasurePasses,
    Workload,
    buffers,
    computed_passes,
    prepacked_bytes,
)
from replicas.memory.shapes import PairShape
from replicas.models import dtype_of
from scheduler.config import SchedulerConfig
from scheduler.messages import KvGroups, blocks_taken

_CPU_SHARE = 0.10
_CUDA_SHARE = 0.90
"""Shares of the memory that is free beside the weights, where no budget is given. A CPU's memory
belongs to others too; what other processes hold of a GPU's is not free."""
PASS_TOKENS_LEAST = 64
"""Narrower prefill passes save next to nothing."""
_ACCEPTANCE = 0.7
"""What rows and draft tokens are weighed with where not all of them fit."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a replica allocates. `work` is what fits of `wanted`; all sizes are in bytes."""

    pair: PairShape
    wanted: Workload
    work: Workload
    buffers: Buffers
    kv_blocks: int
    """Blocks that sequences may use. The scrap block is allocated beside them, and what a prefill
    pass needs, which `buffers` has."""
    block_bytes: int
    budget: int | None
    """What weights, KV cache and buffers may take together; None: KV alone was given."""
    least: int
    """The smallest budget that would do, with this KV cache if its size was given."""
    groups: BlockGroups
    """Layers of the target that share a block table."""

    @property
    def kv_groups(self) -> KvGroups:
        """What a scheduler must know of them."""
        return counted(self.groups, self.work.block_size)

    @property
    def cache_blocks(self) -> int:
        """Blocks to allocate, but for the scrap block."""
        return self.kv_blocks + self.buffers.windows // self.block_bytes

    @property
    def prepack(self) -> bool:
        """Whether weights are laid out a second time, for a CPU to multiply faster."""
        return self.buffers.prepacked > 0

    @property
    def kv_bytes(self) -> int:
        return (self.kv_blocks + 1) * self.block_bytes

    @property
    def total(self) -> int:
        return self.pair.weights + self.kv_bytes + self.buffers.total

    @property
    def rows_max(self) -> int | None:
        """Rows of a batch, where fewer than wanted fit."""
        return None if self.work.rows == self.wanted.rows else self.work.rows

    def draft_len_max(self, most: int) -> int:
        """Draft tokens per row and step: `most`, unless fewer than wanted fit."""
        fits = self.work.draft_len
        return most if fits == self.wanted.draft_len else min(fits, most)

    def sequences(self, length: int) -> int:
        """Sequences of this many tokens whose KV cache fits at once."""
        return self.kv_blocks // blocks_taken(self.kv_groups, -(-length // self.work.block_size))


def plan_memory(
    config: ReplicaConfig,
    pair: PairShape,
    device: torch.device,
    loaded: bool,
    free: int | None = None,
    passes: MeasurePasses | None = None,
) -> MemoryPlan:
    """Divide the memory.

    `loaded`: the weights are on the device already. `free`: what the device has left; None: as
    `free_bytes` finds it. `passes`: what the largest passes take; None: as computed from shapes.
    Raises TooLittleMemory.
    """
    item = dtype_of(config).itemsize
    on_gpu = device.type == "cuda"
    computed = computed_passes(pair.models, item, on_gpu, config.deterministic)
    recorded = on_gpu and config.fixed_shapes(device)

    def beside(work: Workload, passes: MeasurePasses = passes or computed) -> Buffers:
        made = buffers(pair, work, item, passes(work), on_gpu)
        return replace(made, recorded=made.step) if recorded else made

    groups, block_bytes = pair.groups(config.block_size), pair.block_bytes(config.block_size, item)
    wanted = wanted_work(config, pair.context_len)
    full = -(-pair.context_len // config.block_size)
    least_blocks = blocks_taken(counted(groups, config.block_size), full)
    kv_blocks = _given_blocks(config, least_blocks, len(groups), block_bytes, pair.context_len)
    fixed = pair.weights + (1 + (kv_blocks or least_blocks)) * block_bytes
    least = fixed + beside(_least_work(wanted), computed).total
    prepacks = can_prepack(device, dtype_of(config)) and not config.fixed_shapes(device)
    prepacked = sum(map(prepacked_bytes, pair.models)) if prepacks else 0
    budget, given = None, ""
    if config.memory is not None:
        budget = int(config.memory)
        given = f"memory: {in_mib(budget)}"
    elif kv_blocks is None:
        free = free_bytes(device, config.gpu_memory_utilization or 1.0) if free is None else free
        free = max(free if loaded else free - pair.weights, 0)
        share = _CUDA_SHARE if on_gpu else _CPU_SHARE
        twice = prepacked if 2 * prepacked < free else 0  # it counts as weights
        budget = pair.weights + twice + int((free - twice) * share)
        given = f"memory: {in_mib(budget)} ({share:.0%} of what is free beside the weights)"
    work: Workload | None = wanted
    if budget is not None:
        most = usual = budget - fixed
        if kv_blocks is None:
            # A cache as large as the buffers, but no larger than all rows of a batch can fill.
            all_rows = wanted.rows * least_blocks * block_bytes
            usual = max((budget - pair.weights) // 2, most - all_rows)
        # Speed of products is not paid for with smaller batches.
        if beside(wanted).total + prepacked > most:
            prepacked = 0
        if not prepacked:
            work = _fitting(wanted, lambda work: beside(work).total, most, usual)
    if work is None:
        raise TooLittleMemory(
            f"{given} do not hold the weights ({in_mib(pair.weights)}), one sequence of"
            f" {pair.context_len} tokens and the buffers of its step; at least {in_mib(least)}"
            " would, or a smaller context_len",
            least,
        )
    taken = replace(beside(work), prepacked=prepacked)
    if kv_blocks is None:
        assert budget is not None
        kv_blocks = (budget - pair.weights - taken.total) // block_bytes - 1
    return MemoryPlan(pair, wanted, work, taken, kv_blocks, block_bytes, budget, least, groups)


def wanted_work(config: ReplicaConfig, context_len: int) -> Workload:
    """The largest batches to expect."""
    usual, drafting = SchedulerConfig(), config.drafting
    draft_len = usual.draft_len_max if config.plan_draft_len is None else config.plan_draft_len
    if drafting.num_speculative_tokens is not None:
        draft_len = min(draft_len, drafting.num_speculative_tokens)
    prefill_rows = config.plan_prefill_rows or usual.prefill_rows_max
    chunk_tokens = min(config.prefill_chunk_tokens, context_len)
    return Workload(
        rows=config.plan_rows or usual.rows_max,
        draft_len=0 if drafting.method == "none" else draft_len,
        prefill_rows=prefill_rows,
        chunk_tokens=chunk_tokens,
        pass_tokens=prefill_rows * chunk_tokens,
        context_len=context_len,
        block_size=config.block_size,
    )


def _given_blocks(
    config: ReplicaConfig, least: int, tables: int, block_bytes: int, context_len: int
) -> int | None:
    """A block that is given holds all layers: as many blocks as there are tables."""
    given = config.num_gpu_blocks_override
    if given is None:
        return None
    if given * tables < least:
        enough = -(-least // tables)
        raise TooLittleMemory(
            f"num_gpu_blocks_override: {given} blocks of {config.block_size} positions do not hold"
            f" one sequence of {context_len} tokens; at least {enough} blocks"
            f" ({in_mib(enough * tables * block_bytes)}) would, or a smaller context_len",
            enough * tables * block_bytes,
        )
    return given * tables


def _least_work(wanted: Workload) -> Workload:
    return wanted.shrunk(1, min(wanted.draft_len, 1), min(wanted.pass_tokens, PASS_TOKENS_LEAST))


def _fitting(
    wanted: Workload, size: Callable[[Workload], int], most: int, usual: int
) -> Workload | None:
    """The best work whose buffers take `most` bytes; None if none does.

    Narrow prefill passes cost least, so the widest are taken that leave buffers within `usual`
    bytes, if any. Of rows and draft tokens those that commit most per step.
    """
    widths = [wanted.pass_tokens]
    while widths[-1] > PASS_TOKENS_LEAST:
        widths.append(max(widths[-1] // 2, PASS_TOKENS_LEAST))

    def too_large(k: int, rows: int) -> bool:
        return size(wanted.shrunk(rows, k, widths[-1])) > most

    # On a GPU each size is a pass that runs: they are few, and nearly always one is enough.
    steps = [(wanted.rows, wanted.draft_len)]
    if too_large(wanted.draft_len, wanted.rows):
        every = range(1, wanted.rows + 1)
        draft_lens = range(min(wanted.draft_len, 1), wanted.draft_len + 1)
        steps = [(bisect_left(every, True, key=partial(too_large, k)), k) for k in draft_lens]
    rows, k = max(steps, key=lambda step: step[0] * (1 - _ACCEPTANCE ** (step[1] + 1)))
    if not rows:
        return None
    all_widths = [wanted.shrunk(rows, k, width) for width in widths]
    return next((width for width in all_widths if size(width) <= min(most, usual)), all_widths[-1])


def check_memory(config: ReplicaConfig, pair: PairShape, device: torch.device) -> None:
    """Raise TooLittleMemory before weights are read that would not leave room for the rest."""
    plan = plan_memory(config, pair, device, loaded=False)
    # A CPU's memory is taken as it is used; a GPU's is allocated at once.
    if config.memory is not None and device.type == "cuda":
        free = free_bytes(device)
        if free < config.memory:
            raise TooLittleMemory(
                f"memory: {in_mib(config.memory)} are given, but {in_mib(free)} are free on"
                f" {device}; at least {in_mib(plan.least)} would do",
                plan.least,
            )


def free_bytes(device: torch.device, share: float = 1.0) -> int:
    """What the device has left for this process, whose share of a GPU it is.

    On a GPU that is what no process holds, memory that this one has freed and keeps included.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - held
        return max(min(int(free + cached), int(total * share) - int(held)), 0)
    return _free_cpu_bytes()


def _free_cpu_bytes() -> int:
    """What the machine or the container's memory group leaves, page cache counted as free."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return max(free, 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().split("\n")
    except OSError:
        return []


def in_mib(size: int) -> str:
    """For messages, rounded up: what a message names as enough is enough."""
    return f"{-(-size // _MIB)} MiB"
