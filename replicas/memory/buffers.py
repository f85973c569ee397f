"""What a replica takes in memory beside weights and KV cache: bounds from shapes alone.

Passes run one after the other, and each is bounded by what runs at once: the tokens of a step, a
prefill in passes of so many tokens, attention in groups of so many scores. So the largest pass
counts, not all rows at the longest context. The idea of a budget computed before start, and of
speculation shrunk to fit it, is that of SpecMemo (arXiv 2506.01986).

Words: `tokens` are those of one pass over all rows, `item` the bytes of one number in the model's
dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from replicas.invariant.ops import PREPACK_LEAST, TILE
from replicas.kv_cache.host_layout import GATHERED_MOST, SCORES_MOST

_FLOAT32 = 4
_KEPT_SCORES = 4
"""Groups of scores that are held at once: one pass's, and those kept for others of its step."""
_SAMPLING_COPIES = 6
"""Numbers in float32 per logit that choosing holds at once: noise, scores and probabilities."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides the size of its KV cache and of its passes."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    """Width of the MLP; of all experts that see one token together, if that is wider."""
    vocab: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Read from a transformers config."""
        heads = config.num_attention_heads
        experts = (getattr(config, "num_experts_per_tok", None) or 0) * (
            getattr(config, "moe_intermediate_size", None) or 0
        )
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden=config.hidden_size,
            intermediate=max(
                getattr(config, "intermediate_size", None) or 4 * config.hidden_size, experts
            ),
            vocab=config.vocab_size,
        )

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one position in one layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """(times, in, out) of the joined weights."""
        heads = self.heads * self.head_dim
        return [
            (self.layers, self.hidden, heads + self.kv_numbers),
            (self.layers, heads, self.hidden),
            (self.layers, self.hidden, 2 * self.intermediate),
            (self.layers, self.intermediate, self.hidden),
            (1, self.hidden, self.vocab),
        ]


@dataclass(frozen=True, slots=True)
class Workload:
    """The largest batches that memory must last for."""

    rows: int
    draft_len: int
    pass_tokens: int
    """Tokens of one prefill pass, all rows together."""
    context_len: int
    block_size: int

    def __post_init__(self) -> None:
        assert min(self.rows, self.pass_tokens) >= 1
        assert self.draft_len >= 0

    @property
    def step_tokens(self) -> int:
        """Tokens that the target checks in a step."""
        return self.rows * (self.draft_len + 1)

    def shrunk(self, rows: int, draft_len: int, pass_tokens: int) -> Workload:
        return replace(self, rows=rows, draft_len=draft_len, pass_tokens=pass_tokens)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes beside weights and KV cache, for the largest batches of a workload."""

    rotary: int
    """Cosines and sines of every position, of all models."""
    layers: int
    """The hidden states and the widest part of a layer, of the largest pass."""
    attention: int
    """Scores, and keys and values as they are copied."""
    logits: int
    """Those of a step, and what choosing from them takes."""
    loading: int
    """The largest weight in the finer dtype that the model is judged by when it is loaded."""
    prepacked: int
    """Large weights once more, in the layout that a CPU multiplies fastest."""
    slack: int
    """What an allocator holds beyond what is in use."""

    @property
    def total(self) -> int:
        running = self.layers + self.attention + self.logits
        return self.rotary + max(running, self.loading) + self.prepacked + self.slack


def buffers(
    models: list[ModelShape], work: Workload, item: int, on_gpu: bool, prepack: bool
) -> Buffers:
    """What the largest step and the largest prefill of this workload take; the target comes first
    among the models."""
    target = models[0]
    tokens = max(work.step_tokens, work.pass_tokens, TILE)
    rotary = sum(4 * work.context_len * one.head_dim for one in models) * item
    layers = max(_layer_numbers(one) for one in models) * tokens * item
    per_logit = 2 * item + _SAMPLING_COPIES * _FLOAT32
    logits = work.step_tokens * max(one.vocab for one in models) * per_logit
    attention = max(
        _device_attention(one, work, item) if on_gpu else _host_attention(one, work, item)
        for one in models
    )
    widest = max(target.vocab, target.intermediate, target.heads * target.head_dim)
    loading = target.hidden * widest * (8 if item == _FLOAT32 else _FLOAT32)
    counted = Buffers(rotary, layers, attention, logits, loading, 0, 0)
    slack = counted.total // 10 + (128 << 20 if on_gpu else 8 << 20)
    prepacked = sum(prepacked_bytes(one) for one in models) if prepack else 0
    return replace(counted, prepacked=prepacked, slack=slack)


def kv_bytes_per_position(shape: ModelShape, item: int) -> int:
    """Keys and values of one position, all layers."""
    return shape.layers * shape.kv_numbers * item


def prepacked_bytes(shape: ModelShape) -> int:
    """Weights of at least PREPACK_LEAST numbers, in whole tiles of float32."""

    def whole(size: int) -> int:
        return -(-size // TILE) * TILE

    return _FLOAT32 * sum(
        times * whole(fan_in) * whole(fan_out)
        for times, fan_in, fan_out in shape.products
        if fan_in * fan_out >= PREPACK_LEAST
    )


def _layer_numbers(shape: ModelShape) -> int:
    """Numbers per token: the residual with copies, queries, keys and values as computed and as they
    are attended with, gate and up and their product."""
    heads = shape.heads * shape.head_dim
    return 6 * shape.hidden + 4 * (heads + shape.kv_numbers) + 4 * shape.intermediate


def _host_attention(shape: ModelShape, work: Workload, item: int) -> int:
    """Groups are bounded; one row alone may have more, `TILE` tokens of it at once."""
    length = work.context_len + work.draft_len + 1
    queries = TILE * shape.heads
    row = queries * length
    scores = max(min(SCORES_MOST, work.rows * row), row) * _KEPT_SCORES
    gathered = max(
        min(GATHERED_MOST, work.rows * length * shape.kv_numbers), length * shape.kv_numbers
    )
    return (scores + row) * _FLOAT32 + 2 * gathered * item


def _device_attention(shape: ModelShape, work: Workload, item: int) -> int:
    """Keys and values of all rows, and the mask of a step or of a prefill pass, folded twice."""
    length = work.context_len + work.draft_len + 1
    group = shape.heads // shape.kv_heads
    masked = max(work.step_tokens, work.pass_tokens) * length * (1 + item + 2 * group * item)
    return 2 * work.rows * length * shape.kv_numbers * item + masked
