"""What `lockstep plan` does: divide a replica's memory as its load would, and print it.

Of a replica on several devices it is what each rank has.

Reads configs and tokenizers, never weights.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from pydantic import ByteSize
from rich.table import Table

from cluster.config import ClusterConfig
from cluster.local.console import console
from replicas.config import ReplicaConfig
from replicas.errors import PairRefused, TooLittleMemory
from replicas.memory import MemoryPlan, Workload, plan_memory
from replicas.models import dtype_name, resolve_device
from replicas.pair import read_pair

_LENGTHS = (256, 1024, 8192, 65536)
"""Sequences of these lengths are counted, besides those of full context."""


def planned_of(config: ClusterConfig) -> ReplicaConfig:
    """The settings by which a replica of this cluster divides its memory.

    Of a GPU that replicas share by `actors.replica_gpus` each has that part. Where Ray divides the
    GPUs among the replicas it is known only when they are deployed; `gpu_memory_utilization` says
    it here.
    """
    replica, part = config.planned_replica, config.actors.replica_gpus
    if replica.gpu_memory_utilization is not None or part is None or not 0 < part < 1:
        return replica
    return replica.model_copy(update={"gpu_memory_utilization": part})


def print_plan(config: ReplicaConfig, as_json: bool) -> int:
    """Plan and print. Returns the exit status: 1 for too little memory, 2 for no such pair."""
    try:
        device = _device(config)
        plan = plan_memory(config, read_pair(config).shape, device, loaded=False)
    except TooLittleMemory as error:
        console(stderr=True).print(str(error))
        if as_json:
            print(json.dumps({"fits": None, "least_bytes": error.least, "message": str(error)}))
        return 1
    except (PairRefused, OSError, ValueError) as error:
        console(stderr=True).print(str(error))
        return 2
    if as_json:
        print(json.dumps(_as_dict(plan, config, device), indent=2))
        return 0
    out = console()
    for each in (_table(plan, config, device), *_what_fits(plan)):
        out.print(each)
    return 0


def _device(config: ReplicaConfig) -> torch.device:
    """A GPU that is not here can be planned for, where its memory is given.

    Raises PairRefused where it is not.
    """
    sized = config.memory is not None or config.num_gpu_blocks_override is not None
    if sized and config.device.startswith("cuda"):
        return torch.device(config.device)
    try:
        return resolve_device(config.device)
    except PairRefused as error:
        raise PairRefused(f"{error}; --memory plans for one that is not here") from None


def _table(plan: MemoryPlan, config: ReplicaConfig, device: torch.device) -> Table:
    pair, work, counted = plan.pair, plan.work, plan.buffers
    ranks = f", each of {config.tensor_parallel} ranks" if config.tensor_parallel > 1 else ""
    same = ", deterministic" if config.deterministic else ""
    title = f"{dtype_name(config)} on {device.type}{same}{ranks}"
    table = Table("memory", "size", "for", title=title)
    table.columns[1].justify = "right"
    table.add_row("weights of the target", size(pair.target_bytes), config.target)
    if pair.draft.weights:
        table.add_row("weights of the draft", size(pair.draft.weights), config.drafting.model)
    per_token = plan.block_bytes // work.block_size
    blocks = f"{plan.kv_blocks:,} blocks of {work.block_size} x {size(per_token)}"
    if plan.kv_groups:
        tables = [f"{count} with {most or 'all'}" for count, most in plan.kv_groups]
        blocks += f"; a sequence has tables: {', '.join(tables)} blocks"
    table.add_row("KV cache", size(plan.kv_bytes), blocks)
    if counted.windows:
        table.add_row("windows", size(counted.windows), "KV of a prefill pass beyond them")
    table.add_row("rotary tables", size(counted.rotary), f"{work.context_len:,} positions")
    step = f"{work.rows} rows of {work.draft_len + 1} tokens, logits too"
    table.add_row("largest step", f"({size(counted.step)})", step)
    prefill = f"passes of up to {work.pass_tokens:,} tokens"
    table.add_row("largest prefill", f"({size(counted.prefill)})", prefill)
    table.add_row("trial at load", f"({size(counted.loading)})", "once, in a finer dtype")
    if counted.recorded:
        table.add_row("CUDA graphs", size(counted.recorded), "of steps, beside the passes")
    if counted.prepacked:
        table.add_row("prepacked weights", size(counted.prepacked), "the same again, for speed")
    if counted.drafter:
        table.add_row("drafter's memory", size(counted.drafter), "what it remembers of outputs")
    table.add_row("slack", size(counted.slack), "held by the allocator")
    table.add_section()
    table.add_row("together", size(plan.total), "with the largest of ( )")
    if plan.budget is not None:
        origin = "a share of what is free" if config.memory is None else "as given"
        table.add_row("budget", size(plan.budget), origin)
    table.add_row("least", size(plan.least), "one row, one full sequence")
    return table


def _what_fits(plan: MemoryPlan) -> list[str]:
    work, wanted = plan.work, plan.wanted
    counts = ", ".join(
        f"{plan.sequences(length):,} of {length:,} tokens" for length in _lengths(plan)
    )
    lines = [f"KV cache for sequences: {counts}"]
    if work == wanted:
        lines.append(f"All that was wanted fits: {_sizes(work)}.")
    else:
        lines.append(f"Wanted: {_sizes(wanted)}. What fits: {_sizes(work)}.")
    return lines


def _sizes(work: Workload) -> str:
    return (
        f"{work.rows} rows, draft length {work.draft_len}, prefill passes of"
        f" {work.pass_tokens:,} tokens"
    )


def _lengths(plan: MemoryPlan) -> list[int]:
    full = plan.pair.context_len
    return [*(length for length in _LENGTHS if length < full), full]


def _as_dict(plan: MemoryPlan, config: ReplicaConfig, device: torch.device) -> dict[str, Any]:
    """Sizes in bytes, lengths in tokens."""
    counted = plan.buffers
    return {
        "target": config.target,
        "draft": config.drafting.model,
        "device": device.type,
        "dtype": dtype_name(config),
        "deterministic": config.deterministic,
        "tensor_parallel": config.tensor_parallel,
        "context_len": plan.pair.context_len,
        "budget_bytes": plan.budget,
        "total_bytes": plan.total,
        "least_bytes": plan.least,
        "weights_bytes": {"target": plan.pair.target_bytes, "draft": plan.pair.draft.weights},
        "kv": {
            "blocks": plan.kv_blocks,
            "block_size": plan.work.block_size,
            "block_bytes": plan.block_bytes,
            "bytes": plan.kv_bytes,
            "groups": plan.kv_groups,
        },
        "buffers_bytes": {**asdict(counted), "total": counted.total},
        "wanted": asdict(plan.wanted),
        "fits": asdict(plan.work),
        "sequences": {str(length): plan.sequences(length) for length in _lengths(plan)},
    }


def size(count: int) -> str:
    """Bytes for people, in binary units."""
    return ByteSize(count).human_readable(separator=" ")
