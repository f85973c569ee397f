"""What stands between the products of a layer, as one Triton kernel each: for a GPU.

At decode sizes a GPU takes some microseconds for each operation, whatever it computes; these take
the place of eight and of two. Both compute in float32 and round once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kv_cache import PagedCache

_INNER = 1024
"""Numbers of a token that one program activates."""


@triton.jit
def _rotate(
    qkv,  # [tokens, heads + 2 * kv_heads, DIM]; the queries are rotated in place
    cache,  # [positions, 2, kv_heads, DIM]
    slots,  # [tokens], int64
    positions,  # [tokens], int64
    table,  # [context_len, 2, DIM]: cosines; sines, negative for the first half
    weight,  # [heads + kv_heads, DIM], of the norm of each head
    eps,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # a power of two from DIM / 2 on
    NORM: tl.constexpr,
    FINITE: tl.constexpr,
):
    token, vector = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1) - 2 * KV_HEADS
    half: tl.constexpr = DIM // 2
    number = tl.arange(0, HALF)
    real = number < half
    own = qkv + (token * tl.num_programs(1) + vector) * DIM
    low = tl.load(own + number, mask=real, other=0.0).to(tl.float32)
    high = tl.load(own + half + number, mask=real, other=0.0).to(tl.float32)
    if vector < heads + KV_HEADS:
        if NORM:
            scale = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / DIM + eps)
            weights = weight + vector * DIM + number
            low *= scale * tl.load(weights, mask=real, other=0.0).to(tl.float32)
            high *= scale * tl.load(weights + half, mask=real, other=0.0).to(tl.float32)
        turn = table + tl.load(positions + token) * 2 * DIM + number
        cos, cos_high = tl.load(turn, mask=real).to(tl.float32), tl.load(turn + half, mask=real)
        sin, sin_high = tl.load(turn + DIM, mask=real), tl.load(turn + DIM + half, mask=real)
        turned = low * cos + high * sin.to(tl.float32)
        high = high * cos_high.to(tl.float32) + low * sin_high.to(tl.float32)
        low = turned
    goal = own
    if vector >= heads:
        goal = cache + (tl.load(slots + token) * 2 * KV_HEADS + vector - heads) * DIM
        if FINITE:
            low, high = _finite(low), _finite(high)
    tl.store(goal + number, low.to(goal.dtype.element_ty), mask=real)
    tl.store(goal + half + number, high.to(goal.dtype.element_ty), mask=real)


@triton.jit
def _finite(x):
    """Within float16's range, 0 for what is no number."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -65504.0), 65504.0), 0.0)


@triton.jit
def _activate(
    gate_up,  # [tokens, 2 * inner]
    out,  # [tokens, inner]
    inner,
    INNER: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * INNER + tl.arange(0, INNER)
    real = number < inner
    own = gate_up + token * 2 * inner + number
    gate = tl.load(own, mask=real, other=0.0).to(tl.float32)
    up = tl.load(own + inner, mask=real, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * inner + number, value.to(out.dtype.element_ty), mask=real)


def rotate_and_write(
    qkv: torch.Tensor,  # [tokens, heads + 2 * kv_heads, head_dim]
    cache: PagedCache,
    layer: int,
    slots: torch.Tensor,  # [tokens], int64
    positions: torch.Tensor,  # [tokens], int64
    table: torch.Tensor,  # [context_len, 2, head_dim]
    head_norm: tuple[torch.Tensor, float] | None,  # [heads + kv_heads, head_dim], epsilon
) -> None:
    """Rotate the queries in place, and write keys, rotated too, and values into the cache."""
    store = cache.layers[layer]
    kv_heads, dim = store.shape[-2:]
    weight, eps = (table, 0.0) if head_norm is None else head_norm
    _rotate[qkv.shape[0], qkv.shape[1]](
        *(qkv, store, slots, positions, table, weight, eps),
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=triton.next_power_of_2(dim // 2),
        NORM=head_norm is not None,
        FINITE=store.dtype is torch.float16,
        num_warps=1,
    )


def silu_times(gate_up: torch.Tensor) -> torch.Tensor:  # [tokens, 2 * inner] -> [tokens, inner]
    """SiLU of the first half times the second one."""
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, inner))
    _activate[tokens, triton.cdiv(inner, _INNER)](gate_up, out, inner, INNER=_INNER)
    return out
