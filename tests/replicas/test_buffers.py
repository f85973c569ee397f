"""Proves that what a step and a prefill are said to take is what torch allocates for them.

An upper bound by construction, at most twice the measured peak where it is the largest phase.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from replicas.batched import can_batch
from replicas.buffers import Buffers, ModelShape, Workload, buffers, gathered_bytes
from replicas.deterministic import make_deterministic
from replicas.graphs import Limits, StepRunner
from replicas.model import ATTENTION, PagedModel
from replicas.paged_cache import PagedCache
from replicas.prefill import prefill
from replicas.tiles import TILES, Tiles
from replicas.windows import CacheShape
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from replicas.eqspec import Group, step
from replicas.sampling import SamplingBatch
from replicas.stopwatch import Stopwatch
from scheduler.messages import SamplingParams
from tests.memory_meter import peak_bytes

CPU = torch.device("cpu")
ROWS, K, WIDTH, BLOCK = 4, 4, 64, 16
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
}
# Shapes in which one kind of buffer outweighs the others, and the longest content.
SHAPES = {
    "logits": ({"vocab_size": 8000}, 128),
    "mlp": ({"intermediate_size": 2048}, 128),
    "attention": ({"hidden_size": 512, "num_attention_heads": 16, "head_dim": 32}, 128),
    "mask": ({}, 1024),
}
ALL_FILTERS = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=3)


class Bench:
    """One model in both roles, and rows of nearly full length."""

    def __init__(
        self,
        kind: str,
        shape: str,
        dtype: torch.dtype,
        fuse: bool = False,
        tiles: Tiles | None = None,
    ) -> None:
        extra, length = SHAPES[shape]
        config_class, model_class = KINDS[kind]
        small = {
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "pad_token_id": 0,
        }
        self.model = model_class(config_class(**{**small, **extra})).to(dtype).eval()
        self.model.requires_grad_(False).set_attn_implementation(ATTENTION)
        self.shape = ModelShape.of(self.model.config)
        self.length = length
        self.dtype = dtype
        self.fuse = fuse
        blocks = -(-(length + K) // BLOCK)
        self.table = 1 + torch.arange(ROWS * blocks).view(ROWS, blocks)
        self.cache_shape = CacheShape(BLOCK, length + K, dtype)
        self.contents = [[1] * (length - row) for row in range(ROWS)]
        work = Workload(ROWS, K, ROWS, ROWS * WIDTH, length, BLOCK)
        batched = fuse and can_batch(CPU, dtype)
        self.planned = buffers(
            self.shape, self.shape, work, dtype.itemsize, False, tiles, batched=batched
        )
        self.draft = self.model
        if tiles is not None:
            self.draft = copy.deepcopy(self.model)
            make_deterministic(self.model)

    def paged(self, model: PreTrainedModel | None = None) -> PagedModel:
        shape = self.shape
        sizes = (shape.layers, shape.kv_heads, shape.head_dim, self.table.numel(), BLOCK)
        paged = PagedModel(model or self.model, PagedCache(*sizes, self.dtype, CPU))
        paged.try_out(self.cache_shape, self.fuse)
        assert paged.fused == self.fuse
        return paged

    @torch.inference_mode()
    def step_peak(self, sampling: SamplingParams) -> int:
        target, draft = self.paged(), self.paged(self.draft)
        batch = SamplingBatch.of([sampling] * ROWS, CPU)
        group = Group(self.contents, [K] * ROWS, batch, self.table)
        return peak_bytes(lambda: step(target, draft, group, self.cache_shape, Stopwatch(CPU)))

    @torch.inference_mode()
    def fixed_step_peak(self, sampling: SamplingParams, verify: int | None) -> int:
        """Of a step in a bucket, its standing tensors included."""
        target, draft = self.paged(), self.paged(self.draft)
        limits = Limits(ROWS, K, self.length)
        runner = StepRunner(target, draft, self.cache_shape, limits, 8)
        batch = SamplingBatch.of([sampling] * ROWS, CPU, whole=True, static=True)
        group = Group(self.contents, [K] * ROWS, batch, self.table, verify)
        peak = peak_bytes(lambda: runner.step(group, Stopwatch(CPU)))
        assert runner.kinds[0].blocks == self.table.shape[1], "the largest there is"
        return peak

    @torch.inference_mode()
    def prefill_peak(self) -> int:
        paged = self.paged()
        spans = [(len(one) - WIDTH, len(one)) for one in self.contents]
        return peak_bytes(
            lambda: prefill([paged], self.contents, spans, self.table, self.cache_shape, WIDTH)
        )


def step_alone(planned: Buffers) -> int:
    return (
        dataclasses.replace(planned, prefill_pass=0, catch_up_pass=0, fusing=0).total
        - planned.slack
    )


def prefill_alone(planned: Buffers) -> int:
    """Of one model, where both are of one shape."""
    return planned.gathered // 2 + planned.prefill_pass + planned.unpacked


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_planned_buffers_bound_the_measured_peak_and_are_at_most_twice_as_large(
    kind: str, shape: str, fuse: bool
) -> None:
    bench = Bench(kind, shape, torch.float32, fuse)
    step_peak, prefill_peak = bench.step_peak(ALL_FILTERS), bench.prefill_peak()
    assert step_peak <= step_alone(bench.planned) <= 2 * step_peak
    assert prefill_peak <= prefill_alone(bench.planned) <= 2 * prefill_peak


@pytest.mark.parametrize("verify", [None, ROWS * K // 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_fixed_shapes_stay_within_the_plan_too(shape: str, verify: int | None) -> None:
    bench = Bench("qwen3", shape, torch.float32)
    peak = bench.fixed_step_peak(ALL_FILTERS, verify)
    assert peak <= step_alone(bench.planned) <= 3 * peak


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_deterministic_target_stays_within_the_plan_too(
    shape: str, tiles: Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies and what fills up its tiles; without them some of these are beyond it."""
    monkeypatch.setitem(TILES, "cpu", tiles)
    bench = Bench("qwen3", shape, torch.float32, tiles=tiles)
    step_peak, prefill_peak = bench.step_peak(ALL_FILTERS), bench.prefill_peak()
    assert step_peak <= step_alone(bench.planned) <= 5 * step_peak
    assert prefill_peak <= prefill_alone(bench.planned) <= 5 * prefill_peak


@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision_stays_within_the_plan_too(shape: str) -> None:
    """How much a CPU unpacks depends on its instructions, so there is no lower bound here."""
    bench = Bench("llama", shape, torch.bfloat16)
    assert bench.step_peak(ALL_FILTERS) <= step_alone(bench.planned)
    assert bench.prefill_peak() <= prefill_alone(bench.planned)


def test_joined_layers_take_the_place_of_what_they_join() -> None:
    """So weights are counted once, and at load one joined weight on top."""
    bench = Bench("llama", "mlp", torch.float32)

    def stored() -> int:
        storages = (parameter.untyped_storage() for parameter in bench.model.parameters())
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())

    before = stored()
    bench.fuse = True
    bench.paged()
    assert stored() == before
    layer = bench.model.model.layers[0]
    joined = [layer.mlp.gate_proj.weight, layer.self_attn.q_proj.weight]
    assert max(one.untyped_storage().nbytes() for one in joined) == bench.planned.fusing


def test_recorded_steps_have_a_pool_of_their_own_beside_all_else() -> None:
    shape = ModelShape(4, 8, 2, 16, 128, 512, 5000)
    work = Workload(8, 4, 8, 4096, 1024, 16)
    plain = buffers(shape, shape, work, 2, on_gpu=True)
    step = max(plain.draft_pass, plain.verify_pass, plain.sampling) + plain.gathered
    numbers = 8 * (4 + 4 + 2 + 2 * 4 + 65)  # state, verdict and table of a kind
    for recordings in (1, 10):
        kept = buffers(shape, shape, dataclasses.replace(work, recordings=recordings), 2, True)
        assert kept.pool == step
        beside = step + recordings * numbers * 8
        assert kept.total - kept.slack == plain.total - plain.slack + beside


def test_a_gpu_gathers_one_model_at_a_time() -> None:
    target, draft = ModelShape(4, 8, 8, 16, 128, 512, 5000), ModelShape(2, 8, 2, 16, 64, 256, 5000)
    work = Workload(8, 4, 8, 4096, 1024, 16)
    alone = gathered_bytes(target, 8, work.length, 16, 2)
    for second in (draft, None):
        assert buffers(target, second, work, 2, on_gpu=True).gathered == alone


def test_a_greedy_step_takes_no_more_than_a_sampled_one() -> None:
    bench = Bench("llama", "logits", torch.float32)
    assert bench.step_peak(SamplingParams()) <= bench.step_peak(ALL_FILTERS)


def test_the_gathered_copy_is_what_a_pass_leaves_behind() -> None:
    bench = Bench("llama", "mask", torch.float32)
    paged = bench.paged()
    spans = [(len(one) - WIDTH, len(one)) for one in bench.contents]
    with torch.inference_mode():
        prefill([paged], bench.contents, spans, bench.table, bench.cache_shape, WIDTH)
    held = paged._cache._gathered
    assert held.numel() * held.element_size() <= bench.planned.gathered // 2
    block = paged._cache._layers[0][0].nbytes
    assert bench.planned.gathered // 2 - held.nbytes < 2 * ROWS * block


def test_the_parts_grow_with_what_they_depend_on() -> None:
    shape = ModelShape(
        layers=4, heads=8, kv_heads=2, head_dim=16, hidden=128, intermediate=512, vocab=5000
    )
    work = Workload(8, 4, 8, 4096, 1024, 16)

    def total(changed: Workload) -> int:
        return buffers(shape, shape, changed, 4, on_gpu=True).total

    for smaller in ({"rows": 1, "prefill_rows": 1}, {"pass_tokens": 64}, {"context_len": 100}):
        assert total(dataclasses.replace(work, **smaller)) < total(work)
    stepping = dataclasses.replace(work, pass_tokens=64)
    assert total(dataclasses.replace(stepping, draft_len=1)) < total(stepping)
    without = buffers(shape, None, work, 4, on_gpu=True)
    assert (without.draft_pass, without.catch_up_pass) == (0, 0)
