"""What a replica takes in memory beside weights and KV cache.

Passes run one after the other, so the largest one counts: a step of all rows, or one prefill pass.
The idea of a budget computed before start, and of speculation shrunk to fit it, is that of SpecMemo
(arXiv 2506.01986). What the two passes take follows here from shapes; on a GPU it is measured
(`measure`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from replicas.invariant import GATHERED_MOST, PIECE, SCORES_MOST, TILE
from replicas.kv_cache import blocks_of_a_pass
from replicas.memory.shapes import COPIED_MOST, DraftMemory, PairShape
from replicas.models import ModelShape, summed_in_pieces

_FLOAT32 = 4
_GROUPS = 4
"""Groups whose scores one pass holds at once."""
_SAMPLING_COPIES = 6
"""Numbers in float32 per logit that choosing holds at once: noise, scores and probabilities."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The largest batches that memory must last for."""

    rows: int
    draft_len: int
    prefill_rows: int
    chunk_tokens: int
    """Tokens of a prefill pass for each of its rows, however they are divided among them."""
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
class PassBytes:
    """What the two largest passes take while they run."""

    step: int
    """A verification of all rows, its logits, and choosing from them."""
    prefill: int


MeasurePasses = Callable[[Workload], PassBytes]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes beside weights and KV cache, for the largest batches of a workload."""

    rotary: int
    """Cosines and sines of every position, of all models."""
    step: int
    prefill: int
    loading: int
    """The largest weight in the finer dtype that the model is judged by when it is loaded."""
    recorded: int
    """CUDA graphs of steps, whose memory nothing else uses."""
    prepacked: int
    """The weights once more, in the layout that a CPU multiplies fastest."""
    drafter: int
    """What the drafter remembers, where that is in the same memory."""
    windows: int
    """KV blocks that a prefill pass needs beyond those that its rows keep of layers with a
    window."""
    slack: int
    """What an allocator holds beyond what is in use."""

    @property
    def total(self) -> int:
        running = max(self.step, self.prefill, self.loading)
        kept = self.recorded + self.prepacked + self.drafter + self.windows
        return self.rotary + running + kept + self.slack


def buffers(pair: PairShape, work: Workload, item: int, taken: PassBytes, on_gpu: bool) -> Buffers:
    """All of it, where a number of the models has `item` bytes.

    `recorded` and `prepacked` are 0: not every replica has them.
    """
    target = pair.target
    rotary = sum(4 * work.context_len * model.widest.width for model in pair.models) * item
    # A drafter takes hidden states of all tokens of a pass, and joins them.
    aux_bytes = 2 * pair.draft.aux_layers * target.hidden * item
    step = taken.step + aux_bytes * work.step_tokens + _copied(pair.draft, work) * item
    prefill = taken.prefill + aux_bytes * work.pass_tokens
    loading = target.largest * (8 if item == _FLOAT32 else _FLOAT32)
    kept = 0 if on_gpu else pair.draft.kept
    counted = Buffers(rotary, step, prefill, loading, 0, 0, kept, 0, 0)
    slack = counted.total // 10 + (128 << 20 if on_gpu else 8 << 20)
    blocks = blocks_of_a_pass(pair.groups(work.block_size), work.block_size, work.pass_tokens)
    return replace(counted, slack=slack, windows=blocks * pair.block_bytes(work.block_size, item))


def _copied(draft: DraftMemory, work: Workload) -> int:
    """Numbers of a layer's context that a drafter copies: as they lie, in order, and joined with
    those of a block."""
    if not draft.copies_context or draft.model is None:
        return 0
    row = work.context_len * draft.model.kv_numbers
    return 3 * max(min(COPIED_MOST, work.rows * row), row)


def computed_passes(
    models: list[ModelShape], item: int, on_gpu: bool, tiled: bool = False
) -> MeasurePasses:
    """Bounds from shapes alone, with rows as long as the context; `tiled`: in whole tiles."""

    def passes(work: Workload) -> PassBytes:
        # Rows are read as far as if the widest stood at the end of the context.
        length = work.context_len + work.draft_len + 1
        longest = work.context_len + work.chunk_tokens
        logits = max(model.vocab for model in models) * (2 * item + _SAMPLING_COPIES * _FLOAT32)
        step, prefill = 0, 0
        tokens = work.step_tokens
        if tiled:
            tokens = -(-tokens // TILE) * TILE
        for model in models:
            if on_gpu:
                attended = _device_attention(model, work.rows, work.draft_len + 1, length)
                filled = _device_attention(model, work.prefill_rows, work.chunk_tokens, longest)
            else:
                attended = filled = _host_attention(model, work.rows, length, item)
            token = _token_numbers(model) * item
            step = max(step, token * max(work.step_tokens, TILE) + attended)
            prefill = max(prefill, token * max(work.pass_tokens, TILE) + filled)
        return PassBytes(step + tokens * logits, prefill)

    return passes


def _token_numbers(shape: ModelShape) -> int:
    """Numbers per token: the residual with copies, queries, keys and values as computed and as they
    are attended with, gate and up and their product."""
    widest = shape.widest
    heads = widest.heads * widest.width
    return 6 * shape.hidden + 4 * (heads + widest.kv_numbers) + 4 * shape.intermediate


def _host_attention(shape: ModelShape, rows: int, length: int, item: int) -> int:
    """Groups are bounded; one row alone may have more, `TILE` tokens of it at once."""
    row = TILE * max(layer.heads for layer in shape.attention) * length
    scores = max(min(SCORES_MOST, rows * row), row) * _GROUPS
    scores *= len({replace(layer, store=0) for layer in shape.attention})  # each kind has its own
    numbers = length * max(layer.kv_numbers for layer in shape.attention)
    gathered = max(min(GATHERED_MOST, rows * numbers), numbers)
    return (scores + row) * _FLOAT32 + 2 * gathered * item


def _device_attention(shape: ModelShape, rows: int, width: int, length: int) -> int:
    """The kernel's sums of pieces, with a query's largest score and its weights' sum beside each:
    at most of rows as wide as have any."""
    most = 0
    for layer in set(shape.attention):
        group = layer.heads // layer.kv_heads
        queries = rows * min(width, summed_in_pieces(group)) * layer.heads
        most = max(most, queries * -(-length // PIECE) * (layer.value_dim + 2) * _FLOAT32)
    return most


def prepacked_bytes(shape: ModelShape) -> int:
    """Weights in whole tiles of float32."""

    def whole(size: int) -> int:
        return -(-size // TILE) * TILE

    return _FLOAT32 * sum(
        times * whole(fan_in) * whole(fan_out) for times, fan_in, fan_out in shape.products
    )
