"""How a replica's memory is divided: weights, buffers of the largest batches, KV blocks.

All models' caches share one block table, so a block costs all of them. What the buffers cost is in
`buffers`; here is what there is, and what of the wanted batches fits into it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters.eagle3 import Head, HeadConfig
from replicas.invariant.ops import can_prepack
from replicas.memory.buffers import (
    Buffers,
    ModelShape,
    Workload,
    buffers,
    kv_bytes_per_position,
    prepacked_bytes,
)
from replicas.models.pair import Pair, PairFiles, take_part
from scheduler.config import SchedulerConfig

_CPU_SHARE = 0.10
_CUDA_SHARE = 0.90
"""Shares of the memory that is free beside the weights, where no budget is given. A CPU's memory
belongs to others too; what other processes hold of a GPU's is not free."""
PASS_TOKENS_LEAST = 64
"""Narrower prefill passes save next to nothing."""
_ACCEPTANCE = 0.7
"""What rows and draft tokens are weighed with where not all of them fit."""
_MIB = 1 << 20


class TooLittleMemory(ValueError):
    """Not one sequence of full length would fit; the message names the least that would do."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least
        """Bytes for weights, KV cache and buffers that would do."""


@dataclass(frozen=True, slots=True)
class PairShape:
    """What of a target and a draft model must be known to plan memory; no weights are needed."""

    target: ModelShape
    draft: ModelShape | None
    target_bytes: int
    """Bytes of the weights, tied ones counted once."""
    draft_bytes: int
    context_len: int

    @property
    def models(self) -> list[ModelShape]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def weights(self) -> int:
        return self.target_bytes + self.draft_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a replica allocates. `work` is what fits of `wanted`; all sizes are in bytes."""

    pair: PairShape
    wanted: Workload
    work: Workload
    buffers: Buffers
    kv_blocks: int
    """Blocks that sequences may use; one more, the scrap block, is allocated."""
    block_bytes: int
    budget: int | None
    """What weights, KV cache and buffers may take together; None: KV alone was given."""
    least: int
    """The smallest budget that would do, with this KV cache if its size was given."""

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
        return self.kv_blocks // -(-length // self.work.block_size)


def bytes_per_block(shapes: list[ModelShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block costs over all layers of all models."""
    return sum(kv_bytes_per_position(shape, dtype.itemsize) * block_size for shape in shapes)


def wanted_work(config: ReplicaConfig, context_len: int) -> Workload:
    """The largest batches to expect."""
    usual, drafting = SchedulerConfig(), config.drafting
    draft_len = usual.draft_len_max if config.plan_draft_len is None else config.plan_draft_len
    if drafting.num_speculative_tokens is not None:
        draft_len = min(draft_len, drafting.num_speculative_tokens)
    prefill_rows = config.plan_prefill_rows or usual.prefill_rows_max
    return Workload(
        rows=config.plan_rows or usual.rows_max,
        draft_len=0 if drafting.method == "none" else draft_len,
        pass_tokens=prefill_rows * min(config.prefill_chunk_tokens, context_len),
        context_len=context_len,
        block_size=config.block_size,
    )


def plan_memory(
    config: ReplicaConfig,
    pair: PairShape,
    device: torch.device,
    loaded: bool,
    free: int | None = None,
) -> MemoryPlan:
    """Divide the memory; `loaded` says whether the weights are on the device already, `free` what
    the device has left, None: as `free_bytes` finds it.

    Prepacked weights come before a larger cache. Where the budget is short of what the wanted
    batches take, prefill passes become narrower, then rows and draft tokens fewer. Raises
    TooLittleMemory.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    on_gpu = device.type == "cuda"
    block_bytes = bytes_per_block(pair.models, config.block_size, dtype)
    least_blocks = -(-pair.context_len // config.block_size)
    given_blocks = _given_blocks(config, least_blocks, block_bytes, pair.context_len)
    wanted = wanted_work(config, pair.context_len)

    def count(work: Workload, prepack: bool = False) -> int:
        return buffers(pair.models, work, dtype.itemsize, on_gpu, prepack).total

    fixed = (
        pair.weights + ((least_blocks if given_blocks is None else given_blocks) + 1) * block_bytes
    )
    prepack = prepacks(config, device)
    budget: int | None
    if config.memory is not None:
        budget = int(config.memory)
        given = f"memory: {in_mib(budget)}"
    elif given_blocks is not None:
        budget, given = None, ""
    else:
        free = free_bytes(device, config.gpu_share or 1.0) if free is None else free
        free = max(free - (0 if loaded else pair.weights), 0)
        share = _CUDA_SHARE if on_gpu else _CPU_SHARE
        budget = pair.weights + int(free * share)
        given = f"memory: {in_mib(budget)} ({share:.0%} of what is free beside the weights)"
        twice = sum(prepacked_bytes(one) for one in pair.models)
        if prepack and 2 * twice < free:  # they count as weights
            budget = pair.weights + twice + int((free - twice) * share)
    least = fixed + count(_least_work(wanted))
    work: Workload | None = wanted
    if budget is not None:
        most = usual = budget - fixed
        if given_blocks is None:
            # A cache as large as the buffers, but no larger than all rows of a batch can fill.
            all_rows = wanted.rows * least_blocks * block_bytes
            usual = max((budget - pair.weights) // 2, most - all_rows)
        # Speed of products is not paid for with smaller batches.
        prepack = prepack and count(wanted, True) <= most
        work = wanted if prepack else _fitting(wanted, count, most, usual)
    if work is None:
        raise TooLittleMemory(
            f"{given} do not hold the weights ({in_mib(pair.weights)}), one sequence of"
            f" {pair.context_len} tokens and the buffers of its step; at least {in_mib(least)}"
            " would, or a smaller context_len",
            least,
        )
    counted = buffers(pair.models, work, dtype.itemsize, on_gpu, prepack)
    kv_blocks = given_blocks
    if kv_blocks is None:
        assert budget is not None
        kv_blocks = (budget - pair.weights - counted.total) // block_bytes - 1
    return MemoryPlan(pair, wanted, work, counted, kv_blocks, block_bytes, budget, least)


def _given_blocks(
    config: ReplicaConfig, least: int, block_bytes: int, context_len: int
) -> int | None:
    given = config.kv_blocks
    if given is None and config.kv_memory_mb is not None:
        given = config.kv_memory_mb * _MIB // block_bytes
    if given is not None and given < least:
        raise TooLittleMemory(
            f"kv_blocks: {given} blocks of {config.block_size} positions do not hold one"
            f" sequence of {context_len} tokens; at least {least} blocks"
            f" ({in_mib(least * block_bytes)}) would, or a smaller context_len",
            least * block_bytes,
        )
    return given


def prepacks(config: ReplicaConfig, device: torch.device) -> bool:
    """Whether weights are laid out a second time if there is memory for it."""
    wanted = config.pack_weights and not config.fixed_shapes(device)
    return wanted and can_prepack(device, getattr(torch, config.dtype))


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
    steps = sorted(
        (
            (rows, k)
            for rows in range(1, wanted.rows + 1)
            for k in range(min(wanted.draft_len, 1), wanted.draft_len + 1)
        ),
        key=lambda step: step[0] * (1 - _ACCEPTANCE ** (step[1] + 1)),
        reverse=True,
    )
    for rows, k in steps:
        narrowest = wanted.shrunk(rows, k, widths[-1])
        if size(narrowest) <= most:
            all_widths = (wanted.shrunk(rows, k, width) for width in widths)
            return next((one for one in all_widths if size(one) <= min(most, usual)), narrowest)
    return None


# --------------------------------------------------------------------------- what there is


def weight_bytes(model: nn.Module | Head) -> int:
    """Bytes of parameters and buffers; tied parameters are one."""
    if isinstance(model, Head):
        return sum(tensor.nbytes for tensor in model.tensors.values())
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def without_storage(model_config: Any, config: ReplicaConfig) -> PreTrainedModel:
    """A model of sizes alone, whose config may be changed."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(model_config),
            dtype=getattr(torch, config.dtype),
            trust_remote_code=config.trust_remote_code,
        )
    return model


def pair_shape(pair: Pair) -> PairShape:
    """Of models that are loaded."""
    return PairShape(
        target=ModelShape.of(pair.target.config),
        draft=None if pair.draft is None else ModelShape.of(pair.draft.config),
        target_bytes=weight_bytes(pair.target),
        draft_bytes=0 if pair.draft is None else weight_bytes(pair.draft),
        context_len=pair.context_len,
    )


def pair_shape_of(files: PairFiles, config: ReplicaConfig) -> PairShape:
    """Of models whose weights have not been read; with `tensor_parallel` of what a rank holds.

    Raises PairRefused for a target that cannot be divided so.
    """
    target = without_storage(files.target_config, config)
    take_part(target, config, rank=0)
    of_draft, draft_bytes = files.draft_config, 0
    if isinstance(of_draft, HeadConfig):
        draft_bytes = of_draft.numbers * target.dtype.itemsize
    elif of_draft is not None:
        draft = without_storage(of_draft, config)
        of_draft, draft_bytes = draft.config, weight_bytes(draft)
    return PairShape(
        target=ModelShape.of(target.config),
        draft=None if of_draft is None else ModelShape.of(of_draft),
        target_bytes=weight_bytes(target),
        draft_bytes=draft_bytes,
        context_len=files.context_len,
    )


def check_memory(config: ReplicaConfig, files: PairFiles, device: torch.device) -> None:
    """Raise TooLittleMemory before weights are read that would not leave room for the rest."""
    plan = plan_memory(config, pair_shape_of(files, config), device, loaded=False)
    # A CPU's memory is taken as it is used; a GPU's is allocated at once.
    if config.memory is not None and device.type == "cuda":
        free = free_bytes(device)
        if free < config.memory:
            raise TooLittleMemory(
                f"memory: {in_mib(config.memory)} are given, but {in_mib(free)} are free on"
                f" {device}; at least {in_mib(plan.least)} would do",
                plan.least,
            )


def in_mib(size: int) -> str:
    """For messages, rounded up: what a message names as enough is enough."""
    return f"{-(-size // _MIB)} MiB"


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
