"""Proves that the KV cache is sized by what it costs, and that too little memory is refused."""

from __future__ import annotations

import pytest
import torch

from replicas.config import ReplicaConfig
from replicas.memory import KVShape, TooLittleMemory, bytes_per_block, kv_blocks
from replicas.paged_cache import PagedCache

CPU = torch.device("cpu")
SHAPES = [KVShape(layers=3, kv_heads=2, head_dim=8), KVShape(layers=1, kv_heads=4, head_dim=8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_costs_what_the_caches_allocate_for_it(dtype: torch.dtype) -> None:
    caches = [
        PagedCache(
            s.layers, s.kv_heads, s.head_dim, blocks=9, block_size=4, dtype=dtype, device=CPU
        )
        for s in SHAPES
    ]
    # One block more than asked for: the scrap block.
    assert sum(cache.bytes for cache in caches) == 10 * bytes_per_block(SHAPES, 4, dtype)


def test_a_budget_is_turned_into_blocks() -> None:
    config = ReplicaConfig(kv_memory_mb=1, block_size=16)
    per_block = bytes_per_block(SHAPES, 16, torch.float32)
    assert kv_blocks(config, SHAPES, 64, CPU) == 1024 * 1024 // per_block


def test_a_budget_too_small_for_one_sequence_names_what_would_do() -> None:
    config = ReplicaConfig(kv_blocks=3, block_size=16)
    with pytest.raises(TooLittleMemory, match=r"3 blocks of 16 .* 64 tokens; at least 4 blocks"):
        kv_blocks(config, SHAPES, 64, CPU)


def test_without_a_budget_a_share_of_what_is_free_is_taken() -> None:
    blocks = kv_blocks(ReplicaConfig(), SHAPES, 64, CPU)
    assert blocks >= 4
