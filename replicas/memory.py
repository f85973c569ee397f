"""How many KV blocks fit: both models' caches share one block table, so a block costs both."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replicas.config import ReplicaConfig
from replicas.paged_cache import kv_bytes_per_block

# Shares of the memory that is free once the weights are loaded. A CPU's memory belongs to others
# too; a GPU's is ours but for the buffers of the largest step.
_CPU_SHARE = 0.10
_CUDA_SHARE = 0.85
_MB = 1024 * 1024


class TooLittleMemory(ValueError):
    """The KV cache could not hold one sequence of full length; the message names what would do."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What of a model decides the size of its KV cache."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> KVShape:
        """Read from a transformers config."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )


def bytes_per_block(shapes: list[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block costs over all layers of all models."""
    return sum(
        kv_bytes_per_block(s.layers, s.kv_heads, s.head_dim, block_size, dtype) for s in shapes
    )


def kv_blocks(
    config: ReplicaConfig, shapes: list[KVShape], context_len: int, device: torch.device
) -> int:
    """Blocks to allocate; raises TooLittleMemory when a full-length sequence would not fit."""
    dtype = getattr(torch, config.dtype)
    per_block = bytes_per_block(shapes, config.block_size, dtype)
    least = -(-context_len // config.block_size)
    if config.kv_blocks is not None:
        blocks = config.kv_blocks
    elif config.kv_memory_mb is not None:
        blocks = config.kv_memory_mb * _MB // per_block
    else:
        blocks = int(_free_bytes(device)) // per_block
    if blocks < least:
        raise TooLittleMemory(
            f"kv_blocks: {blocks} blocks of {config.block_size} positions do not hold one sequence"
            f" of {context_len} tokens; at least {least} blocks"
            f" ({-(-least * per_block // _MB)} MB) would, or a smaller context_len"
        )
    return blocks


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free * _CUDA_SHARE
    return _free_cpu_bytes() * _CPU_SHARE


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
