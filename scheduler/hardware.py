"""What a step takes on a given device with a given pair: a roofline, or times fitted elsewhere.

A forward pass takes as long as the slower of two: its bytes (weights once, KV of every position
read) over the memory's bandwidth, and its operations over the matrix rate; and a fixed time per
layer on top. (S. Williams, A. Waterman, D. Patterson: Roofline, CACM 52, 2009.) Peak figures are
the vendors'; `bandwidth_share` and `matrix_share` say how much of them is reached.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from scheduler.batches import prefill_tokens
from scheduler.messages import Batch, BatchKind, StepTimes


class Device(BaseModel):
    """An accelerator; figures per second are for 16-bit numbers without sparsity."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes_per_s: float = Field(gt=0, description="Peak memory bandwidth.")
    flops_per_s: float = Field(gt=0, description="Peak matrix rate, operations per second.")
    memory_bytes: float = Field(gt=0, description="Device memory.")
    bandwidth_share: float = Field(default=0.8, gt=0, le=1, description="Share of it reached.")
    matrix_share: float = Field(default=0.6, gt=0, le=1, description="Share of it reached.")
    layer_s: float = Field(
        default=8e-6, ge=0, description="Time per layer and pass whatever its size: launches."
    )
    step_s: float = Field(
        default=0.5e-3, ge=0, description="Time per step that is neither draft nor target."
    )


class Model(BaseModel):
    """Shape of a decoder-only transformer in 16-bit numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(ge=1, description="Layers.")
    hidden: int = Field(ge=1, description="Width of the residual stream.")
    intermediate: int = Field(ge=1, description="Width of the gated feed-forward.")
    heads: int = Field(ge=1, description="Query heads.")
    kv_heads: int = Field(ge=1, description="Key and value heads.")
    head_dim: int = Field(ge=1, description="Width of a head.")
    vocab: int = Field(ge=1, description="Rows of the embedding.")
    tied: bool = Field(default=False, description="Whether embedding and head are one matrix.")

    @property
    def body(self) -> int:
        """Parameters of all layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        """Parameters of the output head."""
        return self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes in memory."""
        return 2 * (self.body + (1 if self.tied else 2) * self.head)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache per position."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


class Pair(BaseModel):
    """A target and its draft; without a draft nothing is proposed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Model
    draft: Model | None = None


def forward_s(
    device: Device, model: Model, tokens: int, kv_positions: int, attended: int, head: bool = True
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


class Roofline(BaseModel):
    """Times of a pair on a device. Rows are read up to the longest of their group."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Device
    pair: Pair

    def times(self, batch: Batch) -> StepTimes:
        """One step of a speculate batch, or all of a prefill."""
        if batch.kind is BatchKind.PREFILL:
            return self._prefill(batch)
        device, rows, k = self.device, len(batch.rows), batch.draft_len
        positions = rows * batch.rows[-1].length
        draft_s = 0.0
        if self.pair.draft is not None and k:
            one_s = forward_s(device, self.pair.draft, rows, positions, positions)
            draft_s = k * one_s
        width = 1 + k
        verify_s = forward_s(device, self.pair.target, rows * width, positions, positions * width)
        return StepTimes(
            draft_s=draft_s, verify_s=verify_s, total_s=draft_s + verify_s + device.step_s
        )

    def _prefill(self, batch: Batch) -> StepTimes:
        tokens = prefill_tokens(batch)
        attended = positions = 0
        for row in batch.prefill:
            until = row.end
            positions += until
            attended += (until * (until + 1) - row.begin * (row.begin + 1)) // 2
        models = [model for model in (self.pair.target, self.pair.draft) if model is not None]
        spent_s = sum(
            forward_s(self.device, model, tokens, positions, attended, head=False)
            for model in models
        )
        return StepTimes(prefill_s=spent_s, total_s=spent_s + self.device.step_s)

    def kv_blocks(self, block_size: int, reserve: float = 0.1) -> int:
        """Blocks that fit beside the weights, with a share of the memory for everything else.

        Raises ValueError if the weights alone do not fit.
        """
        models = [model for model in (self.pair.target, self.pair.draft) if model is not None]
        left = self.device.memory_bytes * (1 - reserve) - sum(one.weight_bytes for one in models)
        blocks = int(left // (block_size * sum(one.kv_bytes for one in models)))
        if blocks < 1:
            raise ValueError("the weights of this pair do not fit into this device's memory")
        return blocks


class FittedTimes(BaseModel):
    """Times fitted to a real replica: linear in what a step does. Seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    draft_fixed_s: float = Field(ge=0, description="A draft pass, whatever its rows.")
    draft_row_s: float = Field(default=0, ge=0, description="The same per row.")
    verify_fixed_s: float = Field(ge=0, description="A verification, whatever its rows.")
    verify_token_s: float = Field(ge=0, description="The same per token: rows times k + 1.")
    kv_position_s: float = Field(default=0, ge=0, description="Per position that a step reads.")
    prefill_fixed_s: float = Field(ge=0, description="A prefill batch.")
    prefill_token_s: float = Field(ge=0, description="The same per token.")
    overhead_s: float = Field(default=0, ge=0, description="A step's own time.")
    kv_tokens: int = Field(default=131_072, ge=1, description="KV positions of a replica.")

    def times(self, batch: Batch) -> StepTimes:
        """One step of a speculate batch, or all of a prefill."""
        if batch.kind is BatchKind.PREFILL:
            spent_s = self.prefill_fixed_s + self.prefill_token_s * prefill_tokens(batch)
            return StepTimes(prefill_s=spent_s, total_s=spent_s)
        rows, k = len(batch.rows), batch.draft_len
        draft_s = k * (self.draft_fixed_s + rows * self.draft_row_s)
        verify_s = self.verify_fixed_s + rows * (k + 1) * self.verify_token_s
        verify_s += rows * batch.rows[-1].length * self.kv_position_s
        return StepTimes(
            draft_s=draft_s, verify_s=verify_s, total_s=draft_s + verify_s + self.overhead_s
        )

    def kv_blocks(self, block_size: int) -> int:
        """Blocks of this size that a replica has."""
        return max(self.kv_tokens // block_size, 1)


DEVICES = {
    "h200": Device(bytes_per_s=4.8e12, flops_per_s=989e12, memory_bytes=141e9),
    "h100": Device(bytes_per_s=3.35e12, flops_per_s=989e12, memory_bytes=80e9),
    "a100-80gb": Device(bytes_per_s=2.039e12, flops_per_s=312e12, memory_bytes=80e9),
    "l40s": Device(bytes_per_s=0.864e12, flops_per_s=362e12, memory_bytes=48e9),
}
"""SXM cards where there are several."""

_QWEN3_8B = Model(
    layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936
)
_QWEN3_06B = Model(
    layers=28,
    hidden=1024,
    intermediate=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    tied=True,
)
_GLM4_9B = Model(
    layers=40, hidden=4096, intermediate=13696, heads=32, kv_heads=2, head_dim=128, vocab=151552
)
_VICUNA_7B = Model(
    layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000
)
_LLAMA_68M = Model(
    layers=2, hidden=768, intermediate=3072, heads=12, kv_heads=12, head_dim=64, vocab=32000
)

PAIRS = {
    "qwen3-8b/0.6b": Pair(target=_QWEN3_8B, draft=_QWEN3_06B),
    "glm-4-9b": Pair(target=_GLM4_9B, draft=_GLM4_9B.model_copy(update={"layers": 2})),
    "vicuna-7b/68m": Pair(target=_VICUNA_7B, draft=_LLAMA_68M),
}
"""GLM-4's draft is a model of two of its layers, for want of a small one of its vocabulary."""
