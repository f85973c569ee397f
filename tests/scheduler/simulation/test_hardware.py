"""The roofline gives what a hand computes, and presets have the sizes of the models they name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.messages import Batch, BatchKind, PrefillRow, Sampling, StepRow
from scheduler.simulation.hardware import DEVICES, PAIRS, Decoder, Device, Roofline, forward_s

PLAIN = Device(
    bytes_per_s=1e9,
    flops_per_s=1e12,
    memory_bytes=1e9,
    bandwidth_share=1,
    matrix_share=1,
    layer_s=0.001,
    step_s=0.01,
)
TINY = Decoder(layers=2, hidden=10, intermediate=20, heads=2, kv_heads=1, head_dim=5, vocab=100)
BODY = 2 * (10 * 10 + 2 * 10 * 5 + 10 * 10 + 3 * 10 * 20)
HEAD = 1000


def speculate(lengths: list[int], draft_len: int) -> Batch:
    rows = tuple(StepRow(str(n), length, draft_len, 1) for n, length in enumerate(lengths))
    return Batch(1, "r", BatchKind.SPECULATE, rows=rows, draft_len=draft_len)


def prefill(begin: int, until: int | None, tokens: int) -> Batch:
    row = PrefillRow("a", (1,) * tokens, 5, Sampling(), (), 9, begin, until)
    return Batch(1, "r", BatchKind.PREFILL, prefill=(row,))


def test_a_pass_of_few_tokens_is_bound_by_its_bytes_one_of_many_by_its_operations() -> None:
    assert (TINY.body, TINY.head, TINY.kv_bytes) == (BODY, HEAD, 2 * 2 * 2 * 1 * 5)
    spent_s = forward_s(PLAIN, TINY, tokens=1, kv_positions=30, attended=30)
    assert spent_s == pytest.approx((2 * (BODY + HEAD) + 30 * 40) / 1e9 + 2 * 0.001)
    tokens = 1_000_000
    spent_s = forward_s(PLAIN, TINY, tokens, kv_positions=1, attended=7, head=False)
    operations = 2 * BODY * tokens + 4 * 7 * 2 * 2 * 5
    assert spent_s == pytest.approx(operations / 1e12 + 0.002)


def test_a_step_is_k_draft_passes_and_one_of_the_target() -> None:
    roofline = Roofline(PLAIN, TINY, TINY)
    # Two rows, each read to its own end: 30 + 50 positions.
    one_s = forward_s(PLAIN, TINY, 2, 80, 80)
    verify_s = forward_s(PLAIN, TINY, 2 * 4, 80, 320)
    times = roofline.times(speculate([30, 50], 3))
    assert times.draft_s == pytest.approx(3 * one_s)
    assert times.verify_s == pytest.approx(verify_s)
    assert times.total_s == pytest.approx(3 * one_s + verify_s + 0.01)
    assert roofline.times(speculate([30, 50], 0)).draft_s == 0


def test_what_is_read_counts_and_so_does_what_lies_before_a_prefill() -> None:
    roofline = Roofline(DEVICES["h100"], *PAIRS["vicuna-7b/68m"])
    even, uneven = speculate([1000] * 8, 4), speculate([500] * 7 + [4500], 4)
    assert roofline.times(even) == roofline.times(uneven)
    assert roofline.times(even).total_s < roofline.times(speculate([1001] * 8, 4)).total_s
    first, second = prefill(0, 500, 1000), prefill(500, None, 1000)
    whole_s = roofline.times(prefill(0, None, 1000)).prefill_s
    # Two chunks read the weights twice and attend to the same pairs.
    assert roofline.times(first).prefill_s < roofline.times(second).prefill_s <= whole_s


def test_blocks_fill_the_memory_that_weights_leave() -> None:
    roofline = Roofline(replace(PLAIN, memory_bytes=100_000.0), TINY, TINY)
    assert roofline.kv_blocks(16, reserve=0) == (100_000 - 2 * TINY.weight_bytes) // (16 * 80)
    with pytest.raises(ValueError, match="do not fit"):
        Roofline(replace(PLAIN, memory_bytes=100.0), TINY, TINY).kv_blocks(16)
