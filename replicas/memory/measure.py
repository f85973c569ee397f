"""What the largest passes take on a GPU: they run on the loaded target, before its cache is made.

All rows read the same few blocks: what a pass copies and computes does not depend on where its
blocks lie.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.invariant import TILE, Arithmetic
from replicas.kv_cache import SCRAP_BLOCK, CacheShape, PagedCache
from replicas.memory.buffers import MeasurePasses, PassBytes, Workload
from replicas.models import NONE, PagedModel, layers_of, paged_backend
from replicas.sampling import SamplingBatch, choose
from scheduler.messages import Sampling

_BLOCKS = 8
"""Of the cache: enough to try attention out."""
TOO_MUCH = 1 << 60
"""Bytes of a pass for which the device has no room."""
_FILTERED = Sampling(temperature=100.0, top_k=10_000, top_p=0.9, min_p=0.01)
"""Of choosing it takes the most: so flat, that few tokens never suffice."""

Peak = Callable[[Callable[[], object], torch.device], int]


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """What a run allocates at most, beyond what is allocated before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measured_passes(
    target: PreTrainedModel, config: ReplicaConfig, context_len: int, peak: Peak = peak_bytes
) -> MeasurePasses:
    """The passes of a workload, each kind measured once, with rows as long as the context."""
    layers, device, block_size = layers_of(target), target.device, config.block_size
    tiled = config.deterministic
    shape = CacheShape.of(block_size, context_len, layers, tile=TILE if tiled else 1)
    kv = PagedCache(shape, layers, _BLOCKS, target.dtype, device)
    backend = paged_backend(kv)
    model = PagedModel(target, kv, backend, Arithmetic((TILE,) if tiled else ()))
    columns = -(-context_len // block_size)

    def table(rows: int) -> torch.Tensor:  # [rows, blocks], int64
        return torch.full((rows, columns), SCRAP_BLOCK, device=device)

    @torch.inference_mode()
    def step(rows: int, width: int) -> None:
        layouts = backend.step_layout(table(rows), [context_len - width] * rows, width)
        tokens = torch.zeros(rows * width, dtype=torch.int64, device=device)
        logits = model.forward(tokens, layouts.window(0, width)).logits
        assert logits is not None
        sampling = SamplingBatch.of([_FILTERED] * rows, device)
        noise = sampling.noise_after(layouts.positions)
        choose(logits.view(rows, width, -1), sampling, noise)

    @torch.inference_mode()
    def prefill(rows: int, chunk: int, tokens: int) -> None:
        # The first rows as wide as may be, the last one a token: all are read as far as if the
        # widest stood at the end of the context.
        tokens = min(tokens, (rows - 1) * chunk + 1)
        ranges = []
        for others in reversed(range(rows)):
            width = min(chunk, tokens - others, context_len - 1)
            if width > 0:
                ranges.append((context_len - width, context_len))
                tokens -= width
        fed = sum(end - begin for begin, end in ranges)
        layout = backend.ranges_layout(table(len(ranges)), ranges)
        model.forward(torch.zeros(fed, dtype=torch.int64, device=device), layout, NONE)

    @cache
    def taken(run: Callable[..., None], *sizes: int) -> int:
        try:
            return peak(lambda: run(*sizes), device)
        except torch.OutOfMemoryError:
            return TOO_MUCH
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def passes(work: Workload) -> PassBytes:
        width = min(work.draft_len + 1, context_len)
        chunks = (work.prefill_rows, work.chunk_tokens, work.pass_tokens)
        # A narrower step may take more: its sums are by pieces of the context.
        widths = {width, min(width, backend.width_most)}
        return PassBytes(
            max(taken(step, work.rows, width) for width in widths), taken(prefill, *chunks)
        )

    return passes
