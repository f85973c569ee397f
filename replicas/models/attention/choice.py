"""Which attention a model gets on a GPU: the paged one, if it computes there what gathering does.

Gathering runs anywhere. The two are held against each other on one layer's cache with random keys
and values, over rows of different lengths in blocks out of order.

Called while no sequence has a block; the cache is cleared afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from replicas.invariant import chunked_attention
from replicas.kv_cache import CacheShape, DeviceLayout, DeviceWindow, PagedCache, device_ranges
from replicas.models.attention.gather import GatherBackend
from replicas.models.attention.paged import PagedBackend
from replicas.models.paged_model import ERROR_FLOOR

AUTO, GATHER, PAGED = "auto", "gather", "paged"

_ROWS = 4
_LENGTH_MOST = 600
"""Positions of the longest row that is compared: some pieces of the kernel."""
_WIDTHS = (1, 5)

_log = logging.getLogger("lockstep.replica")


class AttentionRefused(ValueError):
    """The attention asked for is not to be had here, or computes something else."""


def choose_attention(
    cache: PagedCache, shape: CacheShape, wanted: str
) -> PagedBackend | GatherBackend:
    """The attention over a device's cache that the config wants.

    `auto` gathers where the paged one cannot be had. Raises AttentionRefused where it was asked for
    by name.
    """
    gather = GatherBackend(cache, shape)
    if wanted == GATHER:
        return gather
    try:
        backend = PagedBackend(cache, shape)
        _compare(backend, gather)
    except Exception as error:  # a kernel's compiler may raise anything
        if wanted != AUTO:
            raise AttentionRefused(f"attention {wanted!r} is not to be had: {error}") from error
        _log.warning("attention: keys and values are gathered: %s", error)
        return gather
    finally:
        cache.clear()
    return backend


def invariant_attention(
    cache: PagedCache, shape: CacheShape, wanted: str
) -> Iterator[PagedBackend | GatherBackend]:
    """The ways of a `deterministic` model over a device's cache, the fastest first; which one does
    not depend on the batch is to be proven. Raises as `choose_attention` does."""
    backend = choose_attention(cache, shape, wanted)
    if isinstance(backend, PagedBackend):
        yield backend
    if wanted != PAGED:
        yield GatherBackend(cache, shape, chunked_attention, "chunked")


@torch.inference_mode()
def _compare(backend: PagedBackend, gather: GatherBackend) -> None:
    """Raises AttentionRefused where it computes something else than gathering."""
    cache, shape = backend.cache, backend.shape
    room = min(cache.blocks // _ROWS * shape.block_size, shape.context_len, _LENGTH_MOST)
    columns = -(-room // shape.block_size)
    used = cache.layers[0][: _ROWS * columns + 1]
    device = used.device
    used.copy_(torch.randn(used.shape, dtype=used.dtype, device=device))
    blocks = torch.arange(1, _ROWS * columns + 1, device=device)
    table = blocks.view(columns, _ROWS).flip(0).t().contiguous()
    ends = [max(room >> row, 1) for row in range(_ROWS)]
    windows: list[DeviceWindow] = [
        DeviceLayout(table, [max(end - width, 0) for end in ends], width, shape).window(0, width)
        for width in _WIDTHS
    ]
    windows.append(device_ranges(table, [(end // 2, end) for end in ends], shape))
    for window in windows:
        vectors = shape.heads + 2 * shape.kv_heads
        queries = torch.randn(window.padded, vectors, shape.head_dim, device=device)
        expected, got = (
            one.begin(window, vectors)(0, queries.to(cache.dtype), shape.head_dim**-0.5)
            for one in (gather, backend)
        )
        limit = ERROR_FLOOR[cache.dtype] * expected.abs().max()
        if not bool((got - expected).abs().max() <= limit):
            raise AttentionRefused("it computes something else than gathering")
