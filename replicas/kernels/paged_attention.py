"""Attention over a paged cache as Triton kernels: nothing is gathered, each row reads its own KV.

The keys of a row are cut into pieces of so many positions, always at the same ones. A piece is
summed by itself, and pieces are added up in their order; what a query does not see, behind it or
before its window, adds exactly nothing. So a query's bits depend on its own row alone. With few
queries the pieces run side by side
and a second kernel adds them up (split keys, as in Dao et al., "Flash-Decoding", 2023); in a
prefill one program goes through all of them.

Queries that share a KV head are rows of one matrix: as many, padded, in every pass, for a GPU
multiplies matrices of other heights by other instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

KEYS = 64
"""Positions that are multiplied at once."""
_LEAST: tl.constexpr = tl.constexpr(-1e30)
"""Below every score, and finite: differences to it are numbers."""
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_TWICE_LOG2_E: tl.constexpr = tl.constexpr(2.8853900817779268)


@triton.jit
def _added(best, total, mixed, own_best, own_total, own_mixed, column: tl.constexpr):
    """What two pieces amount to: greatest score, sum of exponentials below it, values they weigh.
    `column`: there are several queries."""
    new_best = tl.maximum(best, own_best)
    share, own_share = tl.exp2(best - new_best), tl.exp2(own_best - new_best)
    new_total = total * share + own_total * own_share
    if column:
        share, own_share = share[:, None], own_share[:, None]
    return new_best, new_total, mixed * share + own_mixed * own_share


@triton.jit
def _sunk(best, total, mixed, sink, column: tl.constexpr):
    """The same with one more score, which weighs no value."""
    return _added(
        best, total, mixed, sink, tl.full(sink.shape, 1.0, tl.float32), mixed * 0.0, column
    )


@triton.jit
def _capped(scores, soft_cap):
    """soft_cap * tanh(score / soft_cap), of scores to the base 2 as the cap is."""
    # exp2 of a large number is infinite, and 1 the right result then.
    return soft_cap - 2.0 * soft_cap / (tl.exp2(scores / soft_cap * _TWICE_LOG2_E) + 1.0)


@triton.jit
def _earliest(last, seen_before, SEEN: tl.constexpr):
    """The first position that a query sees, which sees its `last` at most."""
    if SEEN == 1:
        return last - seen_before + 1
    if SEEN == 2:
        return last - last % seen_before
    return last * 0


@triton.jit
def _first_piece(start, seen_before, SEEN: tl.constexpr, PIECE: tl.constexpr):
    """The first piece of which a query from `start` on sees anything."""
    return tl.maximum(_earliest(tl.maximum(start, 0), seen_before, SEEN), 0) // PIECE


@triton.jit(do_not_specialize=["table_stride", "columns", "pieces", "folded"])
def attend(
    queries,  # [tokens, >= heads, KEY], strided
    cache,  # [blocks, BLOCK, 2, kv_heads, DIM]: keys and values of a position
    out,  # [tokens, heads, VALUE]; of pieces, float32: [rows, kv_heads, pieces, folded, VALUE]
    sums,  # of pieces [rows, kv_heads, pieces, group * width, 2], float32: best score and total
    table,  # [rows, columns], int64
    starts,  # [rows], int64: the position of each row's first query
    firsts,  # [rows], int64: that query's place among the tokens
    counts,  # [rows], int64: queries of each row
    sinks,  # [heads]: a score of each head that weighs no value
    scale,  # of scores, to the base 2
    soft_cap,
    seen_before,  # positions of a window, its own included, or of a chunk
    token_stride,
    head_stride,
    table_stride,
    columns,
    pieces,
    folded,  # group * width
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_ROWS: tl.constexpr,  # the same or more, a power of two
    DIM: tl.constexpr,  # numbers of a key or value in the cache
    KEY: tl.constexpr,  # of them those of a key
    VALUE: tl.constexpr,  # and of a value
    DIMS: tl.constexpr,  # DIM or more, a power of two
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,  # positions whose weighted values are summed in one go
    WHOLE: tl.constexpr,  # a program goes through all pieces of some queries
    CAPPED: tl.constexpr,
    SEEN: tl.constexpr,  # 0: all positions before; 1: a window of them; 2: those of a chunk
    SINKS: tl.constexpr,
):
    row, head, third = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    start, first, count = tl.load(starts + row), tl.load(firsts + row), tl.load(counts + row)
    width: tl.constexpr = QUERIES // GROUP_ROWS
    begin_column = third * width if WHOLE else 0
    if begin_column >= count:
        return
    place = tl.arange(0, QUERIES)
    column, member = begin_column + place // GROUP_ROWS, place % GROUP_ROWS
    wanted = (column < count) & (member < GROUP)
    # A position before the first, and a query that only pads, see the first.
    last = tl.where(wanted, tl.maximum(start + column, 0), 0)
    end = tl.minimum(
        tl.maximum(start + tl.minimum(count, begin_column + width), 1), columns * BLOCK
    )
    number = tl.arange(0, DIMS)
    real = number < VALUE
    heads = head * GROUP + member
    source = queries + (first + column) * token_stride + heads * head_stride
    query = tl.load(
        source[:, None] + number, mask=wanted[:, None] & (number < KEY)[None], other=0.0
    )
    earliest = _earliest(last, seen_before, SEEN)

    best = tl.full((QUERIES,), _LEAST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, DIMS), tl.float32)
    position_stride = 2 * kv_heads * DIM
    least = _first_piece(start + begin_column, seen_before, SEEN, PIECE)
    from_piece = least if WHOLE else third
    to_piece = tl.cdiv(end, PIECE) if WHOLE else third + 1
    if (from_piece * PIECE >= end) | (from_piece < least):
        return
    for piece in range(from_piece, to_piece):
        own_best = tl.full((QUERIES,), _LEAST, tl.float32)
        own_total = tl.zeros((QUERIES,), tl.float32)
        own_mixed = tl.zeros((QUERIES, DIMS), tl.float32)
        for key in range(piece * PIECE, tl.minimum(end, (piece + 1) * PIECE), KEYS):
            position = key + tl.arange(0, KEYS)
            inside = position < end
            block = tl.load(table + row * table_stride + position // BLOCK, mask=inside, other=0)
            slot = (block * BLOCK + position % BLOCK) * position_stride + head * DIM
            both = inside[:, None] & (number < KEY)[None]
            keys = tl.load(cache + slot[:, None] + number, mask=both, other=0.0)
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            if CAPPED:
                scores = _capped(scores, soft_cap)
            seen = inside[None] & (position[None] <= last[:, None])
            if SEEN > 0:
                seen = seen & (position[None] >= earliest[:, None])
            scores = tl.where(seen, scores, -float("inf"))
            new_best = tl.maximum(own_best, tl.max(scores, 1))
            weights = tl.exp2(scores - new_best[:, None])
            share = tl.exp2(own_best - new_best)
            own_total = own_total * share + tl.sum(weights, 1)
            values = tl.load(
                cache + (slot + kv_heads * DIM)[:, None] + number,
                mask=inside[:, None] & real[None],
                other=0.0,
            )
            own_mixed = own_mixed * share[:, None]
            own_mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            own_best = new_best
        best, total, mixed = _added(best, total, mixed, own_best, own_total, own_mixed, True)

    if WHOLE:
        if SINKS:
            sink = tl.load(sinks + heads, mask=wanted, other=0.0).to(tl.float32) * _LOG2_E
            best, total, mixed = _sunk(best, total, mixed, sink, True)
        mixed = mixed / total[:, None]
        goal = out + ((first + column) * kv_heads * GROUP + heads) * VALUE
        tl.store(
            goal[:, None] + number,
            mixed.to(out.dtype.element_ty),
            mask=wanted[:, None] & real[None],
        )
    else:
        at = ((row * kv_heads + head) * pieces + third) * folded + column * GROUP + member
        tl.store(sums + at * 2, best, mask=wanted)
        tl.store(sums + at * 2 + 1, total, mask=wanted)
        tl.store(out + at[:, None] * VALUE + number, mixed, mask=wanted[:, None] & real[None])


@triton.jit(do_not_specialize=["columns", "pieces", "folded"])
def add_pieces(
    parts,  # [rows, kv_heads, pieces, group * width, VALUE], float32
    sums,  # [rows, kv_heads, pieces, group * width, 2], float32
    out,  # [tokens, heads, VALUE]
    starts,
    firsts,
    counts,
    sinks,
    seen_before,
    columns,
    pieces,
    folded,
    GROUP: tl.constexpr,
    VALUE: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    SEEN: tl.constexpr,
    SINKS: tl.constexpr,
):
    row, head, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    start, first, count = tl.load(starts + row), tl.load(firsts + row), tl.load(counts + row)
    column, member = place // GROUP, place % GROUP
    if column >= count:
        return
    end = tl.minimum(tl.maximum(start + count, 1), columns * BLOCK)
    number = tl.arange(0, DIMS)
    real = number < VALUE
    best = tl.full((), _LEAST, tl.float32)
    total = tl.zeros((), tl.float32)
    mixed = tl.zeros((DIMS,), tl.float32)
    least = _first_piece(start, seen_before, SEEN, PIECE)
    for piece in range(least, tl.cdiv(end, PIECE)):
        at = ((row * kv_heads + head) * pieces + piece) * folded + place
        own_best, own_total = tl.load(sums + at * 2), tl.load(sums + at * 2 + 1)
        own_mixed = tl.load(parts + at * VALUE + number, mask=real, other=0.0)
        best, total, mixed = _added(best, total, mixed, own_best, own_total, own_mixed, False)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + member).to(tl.float32) * _LOG2_E
        best, total, mixed = _sunk(best, total, mixed, sink, False)
    goal = out + ((first + column) * kv_heads * GROUP + head * GROUP + member) * VALUE
    tl.store(goal + number, (mixed / total).to(out.dtype.element_ty), mask=real)
