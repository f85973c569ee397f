"""What a step takes, by a roofline of a device and a pair.

A forward pass takes as long as the slower of two: its bytes (weights once, KV of every position
read) over the memory's bandwidth, and its operations over the matrix rate; and a fixed time per
layer on top. (S. Williams, A. Waterman, D. Patterson: Roofline, CACM 52, 2009.) Peak figures are
the vendors'; `bandwidth_share` and `matrix_share` say how much of them is reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from scheduler.messages import Batch, BatchKind, StepTimes

Times = Callable[[Batch], StepTimes]
"""What one step of a speculate batch takes, or all of a prefill."""


@dataclass(frozen=True)
class Device:
    """An accelerator; figures per second are for 16-bit numbers without sparsity."""

    bytes_per_s: float
    """Peak memory bandwidth."""
    flops_per_s: float
    """Peak matrix rate, operations per second."""
    memory_bytes: float
    bandwidth_share: float = 0.8
    matrix_share: float = 0.6
    layer_s: float = 8e-6
    """Time per layer and pass whatever its size: launches."""
    step_s: float = 0.5e-3
    """Time per step that is neither draft nor target."""


@dataclass(frozen=True)
class Decoder:
    """Shape of a decoder-only transformer in 16-bit numbers."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    """Whether embedding and head are one matrix."""

    @property
    def body(self) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        return 2 * (self.body + (1 if self.tied else 2) * self.head)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache per position."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


def joined(device: Device, count: int, sum_s: float = 10e-6) -> Device:
    """So many of them that hold a model together, a part of each layer each; `sum_s`: of one sum
    over all of them, two of which each layer needs."""
    return replace(
        device,
        bytes_per_s=count * device.bytes_per_s,
        flops_per_s=count * device.flops_per_s,
        memory_bytes=count * device.memory_bytes,
        layer_s=device.layer_s + 2 * sum_s,
    )


def forward_s(
    device: Device, model: Decoder, tokens: int, kv_positions: int, attended: int, head: bool = True
) -> float:
    """Seconds of one forward pass of `tokens` tokens that reads `kv_positions` positions of KV.

    `attended`: pairs of a token and a position that it attends to. `head`: whether the output head
    runs, for every token.
    """
    weights = model.body + (model.head if head else 0)
    moved = 2 * weights + kv_positions * model.kv_bytes
    attention = 4 * attended * model.layers * model.heads * model.head_dim
    operations = 2 * weights * tokens + attention
    by_memory = moved / (device.bytes_per_s * device.bandwidth_share)
    by_matrix = operations / (device.flops_per_s * device.matrix_share)
    return max(by_memory, by_matrix) + model.layers * device.layer_s


@dataclass(frozen=True)
class Roofline:
    """A target and its draft on a device. Each row is read up to its own end."""

    device: Device
    target: Decoder
    draft: Decoder
    draft_device: Device | None = None
    """Of the draft's passes, where it is another one: that of one of the target's GPUs, or a GPU of
    its own."""

    def times(self, batch: Batch) -> StepTimes:
        """As `Times` says."""
        if batch.kind is BatchKind.PREFILL:
            return self._prefill(batch)
        device, rows, k = self.device, len(batch.rows), batch.draft_len
        positions = sum(row.length for row in batch.rows)
        tokens = rows * (k + 1)
        draft_s = k * forward_s(self.draft_device or device, self.draft, rows, positions, positions)
        verify_s = forward_s(device, self.target, tokens, positions, positions * (k + 1))
        total_s = draft_s + verify_s + device.step_s
        return StepTimes(draft_s=draft_s, verify_s=verify_s, total_s=total_s)

    def _prefill(self, batch: Batch) -> StepTimes:
        tokens = batch.prefill_tokens
        positions = sum(row.end for row in batch.prefill)
        attended = sum(
            (row.end * (row.end + 1) - row.begin * (row.begin + 1)) // 2 for row in batch.prefill
        )
        of_models = ((self.device, self.target), (self.draft_device or self.device, self.draft))
        prefill_s = sum(
            forward_s(device, model, tokens, positions, attended, head=False)
            for device, model in of_models
        )
        return StepTimes(prefill_s=prefill_s, total_s=prefill_s + self.device.step_s)

    def kv_blocks(self, block_size: int, reserve: float = 0.1) -> int:
        """Blocks that fit beside the weights, with a share of the memory for everything else.

        Raises ValueError if the weights alone do not fit.
        """
        models = (self.target, self.draft)
        weights = sum(model.weight_bytes for model in models)
        left = self.device.memory_bytes * (1 - reserve) - weights
        blocks = int(left // (block_size * sum(model.kv_bytes for model in models)))
        if blocks < 1:
            raise ValueError("the weights of this pair do not fit into this device's memory")
        return blocks


DEVICES = {
    "h200": Device(bytes_per_s=4.8e12, flops_per_s=989e12, memory_bytes=141e9),
    "h100": Device(bytes_per_s=3.35e12, flops_per_s=989e12, memory_bytes=80e9),
    "a100-80gb": Device(bytes_per_s=2.039e12, flops_per_s=312e12, memory_bytes=80e9),
    "l40s": Device(bytes_per_s=0.864e12, flops_per_s=362e12, memory_bytes=48e9),
}
"""SXM cards where there are several."""

_QWEN3_8B = Decoder(36, 4096, 12288, heads=32, kv_heads=8, head_dim=128, vocab=151936)
_QWEN3_06B = Decoder(28, 1024, 3072, heads=16, kv_heads=8, head_dim=128, vocab=151936, tied=True)
_GLM4_9B = Decoder(40, 4096, 13696, heads=32, kv_heads=2, head_dim=128, vocab=151552)
_VICUNA_7B = Decoder(32, 4096, 11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)
_LLAMA_68M = Decoder(2, 768, 3072, heads=12, kv_heads=12, head_dim=64, vocab=32000)

PAIRS = {
    "qwen3-8b/0.6b": (_QWEN3_8B, _QWEN3_06B),
    "glm-4-9b": (_GLM4_9B, replace(_GLM4_9B, layers=2)),
    "vicuna-7b/68m": (_VICUNA_7B, _LLAMA_68M),
}
"""Target and draft. For GLM-4, two of its layers: no small model has its vocabulary."""
