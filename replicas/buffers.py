"""What each tensor of a replica costs in memory: one formula per tensor, its shape beside it.

Everything is computed from shapes, before a weight is read. Transient tensors are counted where
most of them live at once, so the sum is an upper bound of the peak; `tests/replicas/test_buffers`
holds it against measured peaks. The idea of a budget computed before start, and of speculation
shrunk to fit it, is that of SpecMemo (arXiv 2506.01986).

Words: `tokens` are positions of one pass over all rows (rows x width), `length` is KV positions
read per row, `item` the bytes of one number in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from replicas.invariant.ops import PREPACK_LEAST
from replicas.kv_cache.host_layout import SCORES_MOST

Tiles = Any

_FLOAT32 = 4
_INT64 = 8
_HEAP_MOST = 32 << 20
"""glibc's greatest threshold: larger allocations are mappings of their own."""


def whole(n: int, part: int) -> int:
    """n rounded up to whole parts."""
    return -(-n // part) * part


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
    def queries_per_kv(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Workload:
    """The largest batches that memory must last for."""

    rows: int
    """Rows of a group."""
    draft_len: int
    prefill_rows: int
    """Rows of a prefill pass."""
    pass_tokens: int
    """Rows x width of one prefill pass, padding included."""
    context_len: int
    block_size: int
    recordings: int = 0
    """Steps that a GPU keeps recorded; 0: none are recorded."""

    def __post_init__(self) -> None:
        assert min(self.rows, self.prefill_rows, self.pass_tokens) >= 1
        assert self.draft_len >= 0

    @property
    def rows_most(self) -> int:
        """Rows of any pass."""
        return max(self.rows, self.prefill_rows)

    @property
    def length(self) -> int:
        """KV positions that a step reads per row: all of the content and the draft tokens, in whole
        blocks, as steps of fixed shapes read them."""
        return whole(self.context_len + self.draft_len, self.block_size)

    def shrunk(self, rows: int, draft_len: int, pass_tokens: int) -> Workload:
        """The same with smaller batches; fewer steps are kept recorded if passes are narrower."""
        kept = max(self.recordings * pass_tokens // self.pass_tokens, min(self.recordings, 4))
        return replace(
            self,
            rows=rows,
            draft_len=draft_len,
            prefill_rows=min(self.prefill_rows, rows) if rows < self.rows else self.prefill_rows,
            pass_tokens=pass_tokens,
            recordings=kept,
        )


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes beside weights and KV cache, for the largest batches of a workload."""

    gathered: int
    """Standing; see `gathered_bytes`."""
    rotary: int
    """Standing; see `rotary_bytes`."""
    draft_pass: int
    verify_pass: int
    sampling: int
    """Logits of the verify pass and what choosing from them takes."""
    prefill_pass: int
    catch_up_pass: int
    """The draft's prefill, which is also how it catches up after steps without drafting."""
    fusing: int
    """See `fusing_bytes`."""
    recorded: int
    """Standing; see `recorded_bytes`."""
    unpacked: int
    """See `unpacked_bytes`; 0 on a GPU."""
    packed: int
    """Standing; see `packed_bytes`; 0 where weights are not packed."""
    slack: int
    """See `slack_bytes`; on a CPU also `joined_bytes`."""

    @property
    def counting(self) -> str:
        """The phase that counts: they follow one another, so the largest does."""
        return max((*_STEPS, *_OTHERS), key=lambda name: int(getattr(self, name)))

    @property
    def pool(self) -> int:
        """What the largest recorded step takes, what it gathers included. The pool is set up with
        that in one piece: it gives nothing back, and of kinds that come by rising size each would
        bring its own."""
        return self.gathered + max(int(getattr(self, name)) for name in _STEPS)

    @property
    def total(self) -> int:
        standing = self.gathered + self.rotary + self.unpacked + self.packed + self.recorded
        return standing + int(getattr(self, self.counting)) + self.slack


_STEPS = ("draft_pass", "verify_pass", "sampling")
_OTHERS = ("prefill_pass", "catch_up_pass", "fusing")


def buffers(
    target: ModelShape,
    draft: ModelShape | None,
    work: Workload,
    item: int,
    on_gpu: bool,
    tiles: Tiles | None = None,
    packed: bool = False,
    batched: bool = False,
) -> Buffers:
    """What the largest step and the largest prefill of this workload take; with `tiles` the target
    is deterministic, with `packed` weights are laid out a second time, with `batched` steps may
    take the attention of `replicas.batched`."""
    rows, k = work.rows, work.draft_len
    models = [target] if draft is None else [target, draft]
    vocab = max(model.vocab for model in models)
    tokens = rows * (k + 1)

    def stepping(model: ModelShape, fed: int) -> int:
        kept = batched_bytes(model, rows, fed, work.length, item) if batched else 0
        return pass_bytes(model, fed, work.length, item, kept)

    # One layout serves all passes of a step; the noise of a step is drawn before its first pass.
    standing = layout_bytes(rows * (k + 2), work.length, item) + noise_bytes(tokens, target.vocab)
    drafting = 0
    if draft is not None and k > 0:
        one = logits_bytes(rows, draft.vocab, item) + scores_bytes(rows, draft.vocab)
        drafting = standing + max(stepping(draft, rows * 2), one)
    filling = layout_bytes(work.pass_tokens, work.context_len, item)
    choosing = hidden_bytes(target, tokens, item) + logits_bytes(tokens, vocab, item)
    if tiles is None:
        verify = stepping(target, tokens)
        prefill = pass_bytes(target, work.pass_tokens, work.context_len, item)
    else:
        fill_rows = work.prefill_rows
        verify = tiled_pass_bytes(target, rows, tokens, work.length, item, tiles)
        prefill = tiled_pass_bytes(
            target, fill_rows, work.pass_tokens, work.context_len, item, tiles
        )
        choosing += tiled_logits_bytes(target, tokens, item, tiles)
        # A prefill computes the logits of one position per row.
        prefill = max(prefill, tiled_logits_bytes(target, fill_rows, item, tiles))
    gathered = [
        gathered_bytes(model, work.rows_most, work.length, work.block_size, item)
        for model in models
    ]
    counted = Buffers(
        # A CPU keeps one for each model; a GPU has the one that it reads.
        gathered=max(gathered) if on_gpu else sum(gathered),
        rotary=sum(rotary_bytes(model, work.context_len, item) for model in models),
        draft_pass=drafting,
        verify_pass=standing + verify,
        sampling=standing + choosing + scores_bytes(tokens, vocab),
        prefill_pass=filling + prefill,
        catch_up_pass=0
        if draft is None
        else filling + pass_bytes(draft, work.pass_tokens, work.context_len, item),
        recorded=0,
        fusing=max(fusing_bytes(model, item) for model in models),
        unpacked=0 if on_gpu else max(unpacked_bytes(model, item) for model in models),
        packed=0,
        slack=0,
    )
    left = 0 if on_gpu else sum(joined_bytes(model, item) for model in models)
    # Weights are in one piece each: they need no slack.
    packing = sum(packed_bytes(model, item) for model in models) if packed else 0
    counted = replace(counted, recorded=recorded_bytes(counted, work))
    return replace(counted, slack=slack_bytes(counted.total, on_gpu) + left, packed=packing)


# --------------------------------------------------------------------------- standing tensors


def kv_bytes_per_position(shape: ModelShape, item: int) -> int:
    """Keys and values of one position: layers x [2, kv_heads, head_dim]."""
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * item


def gathered_bytes(shape: ModelShape, rows: int, length: int, block_size: int, item: int) -> int:
    """One layer's KV of a group: [rows * blocks of the longest, block_size, 2, kv_heads, head_dim].

    It is kept between passes, and grows to the largest group seen.
    """
    return rows * whole(length, block_size) * 2 * shape.kv_heads * shape.head_dim * item


def rotary_bytes(shape: ModelShape, context_len: int, item: int) -> int:
    """Cosines and sines of fused layers, [context_len, head_dim] each, and both in one table."""
    return 4 * context_len * shape.head_dim * item


# --------------------------------------------------------------------------- transient tensors


def layout_bytes(tokens: int, length: int, item: int) -> int:
    """The mask of a step or pass, [rows, width, length], in numbers and, before that, in bools."""
    return tokens * length * (item + 1)


def folded_mask_bytes(shape: ModelShape, tokens: int, length: int, item: int) -> int:
    """The mask as one layer's attention wants it: [rows, 1, queries_per_kv * width, length].

    Twice, because a kernel that wants rows of another alignment makes a copy.
    """
    return 2 * shape.queries_per_kv * tokens * length * item


def batched_bytes(shape: ModelShape, rows: int, tokens: int, length: int, item: int) -> int:
    """What attention by batched products keeps for a pass, or for the largest that it is taken for:
    scores and their mask [rows, heads, width, length], queries and results [rows, heads, width,
    head_dim], and where keys and values lie [2, rows, kv_heads, length], with one copy and that of
    an earlier pass."""
    scores = min(shape.heads * tokens * length, SCORES_MOST)
    read = 2 * shape.kv_heads * min(rows * length, SCORES_MOST // shape.heads)
    return 2 * (scores + tokens * shape.heads * shape.head_dim) * item + 3 * read * _INT64


def hidden_bytes(shape: ModelShape, tokens: int, item: int) -> int:
    """[rows, width, hidden]: the residual, the normed copy and one in flight; two in float32."""
    return tokens * shape.hidden * (3 * item + 2 * _FLOAT32)


def positions_bytes(shape: ModelShape, tokens: int, item: int) -> int:
    """Cosines and sines [rows, width, head_dim], with their angles in float32."""
    return tokens * (shape.head_dim * (2 * item + 2 * _FLOAT32) + 3 * _INT64)


def attention_bytes(shape: ModelShape, tokens: int, item: int) -> int:
    """Queries [rows, heads, width, head_dim], with their rotation four at once; keys and values
    [rows, kv_heads, width, head_dim] as computed, rotated, and stacked for the cache."""
    queries = 4 * shape.heads * shape.head_dim
    keys_and_values = 8 * shape.kv_heads * shape.head_dim
    return tokens * (queries + keys_and_values) * item


def mlp_bytes(shape: ModelShape, tokens: int, item: int) -> int:
    """[rows, width, intermediate] four times: gate, up, the activated gate, and their product."""
    return 4 * tokens * shape.intermediate * item


def pass_bytes(shape: ModelShape, tokens: int, length: int, item: int, batched: int = 0) -> int:
    """One forward pass but for its logits: the hidden states and the larger half of a layer. All
    layers share one folded mask, or what `batched` attention keeps, in bytes."""
    masks = folded_mask_bytes(shape, tokens, length, item)
    attention = attention_bytes(shape, tokens, item) + max(masks, batched)
    half = max(attention, mlp_bytes(shape, tokens, item) + max(masks // 2, batched))
    return hidden_bytes(shape, tokens, item) + positions_bytes(shape, tokens, item) + half


def logits_bytes(tokens: int, vocab: int, item: int) -> int:
    """[rows, width, vocab] in the model's dtype, and the sampled rows' copy of them."""
    return 2 * tokens * vocab * item


def noise_bytes(tokens: int, vocab: int) -> int:
    """Gumbel noise [rows, k + 1, vocab], float32."""
    return tokens * vocab * _FLOAT32


def scores_bytes(tokens: int, vocab: int) -> int:
    """[rows, width, vocab] in float32: scores before and after top-k, noisy scores, probabilities,
    and either those of likelier tokens or the last two again; and two comparisons in bools."""
    return tokens * vocab * (6 * _FLOAT32 + 2)


# --------------------------------------------------------------------------- in tiles


def tiled_pass_bytes(
    shape: ModelShape, rows: int, tokens: int, length: int, item: int, tiles: Tiles
) -> int:
    """One forward pass of a deterministic model but for its logits.

    Layers see whole tiles [tile, width]: their results are part of one, or joined from several,
    beside a padded input. Which attention proves invariant is known after the load only, so the
    larger counts.
    """
    padded = whole(tokens, tiles.rows)
    widest = max(shape.intermediate, shape.heads * shape.head_dim, shape.hidden)
    attention = attention_bytes(shape, padded, item) + max(
        tiled_attention_bytes(shape, rows, tokens, length, tiles),
        efficient_attention_bytes(shape, rows, tokens, length, item, tiles),
    )
    half = max(attention, mlp_bytes(shape, padded, item))
    in_tiles = 2 * padded * widest * item
    passing = hidden_bytes(shape, padded, item) + positions_bytes(shape, padded, item)
    # Sines and cosines are computed in tiles, too, and joined.
    return passing + positions_bytes(shape, padded, item) + half + in_tiles


def tiled_attention_bytes(
    shape: ModelShape, rows: int, tokens: int, length: int, tiles: Tiles
) -> int:
    """In float32: keys and values [rows, kv_heads, chunks * chunk, head_dim], the mask [rows,
    width, chunks * chunk], queries and results [rows, heads, width, head_dim] six at once; and of
    one tile of queries, for each (row, KV head, chunk), the queries and twice the weighted values
    [queries_per_kv * tile, head_dim] and the mask [queries_per_kv * tile, chunk]."""
    reach = whole(length, tiles.chunk)
    padded = tokens + rows * (tiles.queries - 1)
    keys_and_values = 2 * rows * shape.kv_heads * reach * shape.head_dim
    queries = 6 * padded * shape.heads * shape.head_dim
    products = whole(rows * shape.kv_heads * (reach // tiles.chunk), tiles.items)
    products *= shape.queries_per_kv * tiles.queries
    tile = products * (3 * shape.head_dim + tiles.chunk + 8)
    # Scores, their exponentials and what stands between them, of one batched product.
    scores = 4 * tiles.items * shape.queries_per_kv * tiles.queries * tiles.chunk
    return _FLOAT32 * (keys_and_values + padded * reach + queries + tile + scores)


def efficient_attention_bytes(
    shape: ModelShape, rows: int, tokens: int, length: int, item: int, tiles: Tiles
) -> int:
    """Keys and values in whole chunks, the mask so and as the kernel wants it."""
    reach = whole(length, tiles.chunk)
    keys_and_values = 2 * rows * shape.kv_heads * reach * shape.head_dim * item
    mask = tokens * reach * item
    return keys_and_values + mask + folded_mask_bytes(shape, tokens, reach, item)


def tiled_logits_bytes(shape: ModelShape, tokens: int, item: int, tiles: Tiles) -> int:
    """What logits in tiles [tile, vocab] take beyond [tokens, vocab]: the rest of the last tile,
    and of several tiles the parts that are joined; with the padded input."""
    padded = whole(tokens, tiles.rows)
    more = padded - tokens + (padded if padded > tiles.rows else 0)
    return more * shape.vocab * item + padded * shape.hidden * item


# --------------------------------------------------------------------------- beside the tensors


def recorded_bytes(counted: Buffers, work: Workload) -> int:
    """What recorded steps hold: the pool that they share, and each one its inputs and verdict
    [4 + k, rows] and [2 + 2 * k, rows] and its block table [rows, blocks]. Before it is recorded
    each is run outside of the pool, so a step's memory counts among the phases as well."""
    if not work.recordings:
        return 0
    lines = 6 + 3 * work.draft_len + -(-work.length // work.block_size)
    return counted.pool + work.recordings * work.rows * lines * _INT64


def fusing_bytes(shape: ModelShape, item: int) -> int:
    """While layers are joined at load, one weight is there twice: that of queries, keys and values
    [(heads + 2 * kv_heads) * head_dim, hidden] or of gate and up [2 * intermediate, hidden]."""
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return shape.hidden * max(attention, 2 * shape.intermediate) * item


def joined_bytes(shape: ModelShape, item: int) -> int:
    """Weights of queries, keys, values, gate and up of all layers, which leave their place in a
    CPU's heap when they are joined; it goes back to the system where a matrix is large."""
    columns = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate)
    q, kv, mlp = (shape.hidden * one * item for one in columns)
    kept = sum(size * count for size, count in ((q, 1), (kv, 2), (mlp, 2)) if size < _HEAP_MOST)
    return shape.layers * kept


def packed_bytes(shape: ModelShape, item: int) -> int:
    """The large weights once more, in the layout that a CPU multiplies fastest: of all layers
    [(heads + 2 * kv_heads) * head_dim, hidden], [hidden, heads * head_dim],
    [2 * intermediate, hidden] and [hidden, intermediate], and the output layer [vocab, hidden]."""
    heads = shape.heads * shape.head_dim
    of_layer = (
        (heads + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        (shape.hidden, heads),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    )
    weights = [*of_layer * shape.layers, (shape.vocab, shape.hidden)]
    return sum(
        _whole_tiles(outputs) * _whole_tiles(inputs) * item
        for outputs, inputs in weights
        if outputs * inputs >= PREPACK_LEAST
    )


def _whole_tiles(size: int) -> int:
    return -(-size // 64) * 64


def unpacked_bytes(shape: ModelShape, item: int) -> int:
    """A CPU without instructions for 16-bit numbers multiplies in float32: the largest matrix,
    [vocab, hidden] or [2 * intermediate, hidden], is unpacked and once more laid out for that."""
    if item == _FLOAT32:
        return 0
    heads = shape.heads * shape.head_dim
    return 2 * _FLOAT32 * shape.hidden * max(shape.vocab, 2 * shape.intermediate, heads)


def slack_bytes(buffers_total: int, on_gpu: bool) -> int:
    """What an allocator holds beyond what is in use: a tenth of the buffers for fragments, and a
    fixed part for its smallest pieces and, on a GPU, the workspaces of matrix libraries."""
    return buffers_total // 10 + (128 << 20 if on_gpu else 8 << 20)
