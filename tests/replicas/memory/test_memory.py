"""Proves that memory is divided as given, that speculation shrinks before anything is refused, and
that a refusal names the least that would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.local.engine import LocalEngine
from replicas.config import ReplicaConfig
from replicas.drafters.model import ModelDrafter
from replicas.errors import TooLittleMemory
from replicas.invariant.ops import can_prepack
from replicas.kv_cache import CacheShape, PagedCache
from replicas.memory import MemoryPlan, PairShape, check_memory, free_bytes, plan_memory
from replicas.memory.buffers import PassBytes, Workload, buffers, computed_passes, prepacked_bytes
from replicas.memory.measure import measured_passes, peak_bytes
from replicas.memory.plan import PASS_TOKENS_LEAST
from replicas.memory.shapes import DraftMemory
from replicas.models import device_attention as attention
from replicas.models.model_shape import ModelShape, weight_bytes, without_storage
from replicas.pair import Pair, load_pair, read_pair
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from tests.gathering import Kernels
from tests.reference import plain_greedy
from tests.replicas.kv_cache.windowed import drafted_pair, windowed_pair
from tests.replicas.test_pair import WORDS, save_model
from tests.tiny_pairs import DEVICE, SHAPE, target_model, tiny_pair, tiny_replica, unrecorded

CPU = torch.device("cpu")
GPU = torch.device("cuda")
SIZES = {"num_attention_heads": 4, "head_dim": 8, "hidden_size": 32, "intermediate_size": 512}
SHAPES = [
    ModelShape.of(
        LlamaConfig(num_hidden_layers=3, num_key_value_heads=2, vocab_size=3000, **SIZES)
    ),
    ModelShape.of(
        LlamaConfig(num_hidden_layers=1, num_key_value_heads=4, vocab_size=3000, **SIZES)
    ),
]
PAIR = PairShape(SHAPES[0], 5_000_000, 64, DraftMemory(2_000_000, SHAPES[1]))


def planned(device: torch.device = CPU, loaded: bool = True, **settings: object) -> MemoryPlan:
    return plan_memory(ReplicaConfig(**{"plan_rows": 8, **settings}), PAIR, device, loaded)


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("replicas.memory.plan.free_bytes", lambda device, share=1.0: size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_costs_what_the_caches_allocate_for_it(dtype: torch.dtype) -> None:
    caches = [
        PagedCache(CacheShape.of(4, 64, shape.attention), shape.attention, 9, dtype, CPU)
        for shape in SHAPES
    ]
    # One block more than asked for: the scrap block.
    assert sum(store.nbytes for cache in caches for store in cache.layers) == 10 * PAIR.block_bytes(
        4, dtype.itemsize
    )


@pytest.mark.parametrize("pair_of", [windowed_pair, drafted_pair])
def test_layers_with_a_window_are_planned_by_their_window(
    pair_of: Callable[[str], Pair],
) -> None:
    """5 of 6 layers; what is counted for a sequence is what `ReplicaSpec` counts."""
    pair = pair_of("gemma3_text")
    config = ReplicaConfig(
        block_size=4, memory="40MiB", device="cpu", plan_rows=2, prefill_chunk_tokens=32
    )
    plan = pair.plan(config)
    assert plan.budget is not None
    assert plan.budget - plan.block_bytes < plan.total <= plan.budget
    replica = Replica(pair, config, plan)
    caches = [unrecorded(replica.target).cache]
    if isinstance(replica.drafter, ModelDrafter):
        caches.append(unrecorded(replica.drafter.model).cache)
    stores = {id(store): store.nbytes for cache in caches for store in cache._stores}
    assert sum(stores.values()) == (plan.cache_blocks + 1) * plan.block_bytes
    assert plan.cache_blocks > plan.kv_blocks, "a pass needs more than the windows"
    spec, blocks = replica.spec, -(-200 // 4)
    assert plan.sequences(200) == spec.kv_blocks // spec.blocks_taken(blocks)
    assert spec.blocks_taken(blocks) < len(plan.groups) * blocks


def test_a_given_block_holds_all_layers_as_long_as_a_text_is_kept_whole() -> None:
    pair = windowed_pair("gemma3_text")
    given = {"block_size": 4, "device": "cpu"}
    plan = pair.plan(ReplicaConfig(num_gpu_blocks_override=100, **given))
    assert plan.kv_blocks == 100 * 6
    assert pair.plan(ReplicaConfig(num_gpu_blocks_override=28, **given)).sequences(256) == 1
    with pytest.raises(TooLittleMemory, match=r"27 blocks of 4 .* at least 28 blocks"):
        pair.plan(ReplicaConfig(num_gpu_blocks_override=27, **given))


def test_a_cache_too_small_for_one_sequence_names_what_would_do() -> None:
    with pytest.raises(TooLittleMemory, match=r"3 blocks of 16 .* 64 tokens; at least 4 blocks"):
        planned(num_gpu_blocks_override=3, block_size=16)


def test_a_budget_is_used_up_to_the_last_block_and_never_beyond() -> None:
    for size in range(40_000_000, 41_000_000, 99_991):
        plan = planned(memory=size)
        assert size - plan.block_bytes < plan.total <= size
        assert plan.work == plan.wanted


def test_budgets_are_read_with_units() -> None:
    assert ReplicaConfig(memory="2GiB").memory == 2 * 1024**3
    assert ReplicaConfig(memory="1.5 GB").memory == 1_500_000_000
    for wrong in ("20 bananas", 0, -1):
        with pytest.raises(ValidationError, match="memory"):
            ReplicaConfig(memory=wrong)


def test_a_budget_beside_a_given_cache_bounds_the_buffers() -> None:
    plan = planned(memory=60_000_000, num_gpu_blocks_override=50)
    assert plan.kv_blocks == 50
    assert plan.total <= 60_000_000
    with pytest.raises(TooLittleMemory, match="memory: 58 MiB do not hold"):
        planned(memory=60_000_000, num_gpu_blocks_override=5000)


@pytest.mark.skipif(not can_prepack(CPU, torch.float32), reason="this torch has no oneDNN")
def test_weights_are_laid_out_twice_only_where_nothing_has_to_shrink_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roomy = planned(memory=120_000_000)
    assert roomy.prepack
    assert roomy.buffers.prepacked == sum(prepacked_bytes(shape) for shape in SHAPES) > 0
    for size in range(roomy.least, 120_000_000, 1_000_000):
        made = planned(memory=size)
        with monkeypatch.context() as patch:
            patch.setattr("replicas.memory.plan.can_prepack", lambda *_: False)
            plain = planned(memory=size)
        assert (made.work, made.least) == (plain.work, plain.least)
        assert made.total <= size
        if made.prepack:
            assert made.work == made.wanted
    assert not planned(memory=roomy.least).prepack
    assert planned(num_gpu_blocks_override=50).prepack
    assert not planned(memory=60_000_000, dtype="bfloat16").prepack
    assert not planned(GPU, memory=600_000_000).prepack


def test_what_is_named_as_the_least_does_and_one_block_less_does_not() -> None:
    with pytest.raises(TooLittleMemory, match=r"do not hold .* at least .* MiB would") as refused:
        planned(memory=1)
    least = refused.value.least
    plan = planned(memory=least)
    assert plan.least == least == plan.total
    assert plan.work.rows == 1
    assert plan.work.pass_tokens == PASS_TOKENS_LEAST
    assert plan.sequences(64) == 1
    with pytest.raises(TooLittleMemory):
        planned(memory=least - 1)


def test_less_memory_shrinks_passes_first_then_rows_and_draft_tokens() -> None:
    least = planned(memory=100_000_000).least
    plans = [planned(memory=size) for size in range(least, least + 30_000_000, 100_000)]
    committed = [p.work.rows * (1 - 0.7 ** (p.work.draft_len + 1)) for p in plans]
    assert committed == sorted(committed)
    assert plans[0].work.rows == 1
    assert plans[-1].work == plans[-1].wanted
    unshrunk = [p.work.pass_tokens for p in plans if p.rows_max is None and p.work.draft_len == 8]
    assert unshrunk == sorted(unshrunk)
    assert len(set(unshrunk)) > 1
    # Speculation shrinks only where the narrowest passes do not help.
    for plan in plans:
        if plan.work.rows < 8 or plan.work.draft_len < 8:
            narrowest = plan.wanted.shrunk(8, 8, PASS_TOKENS_LEAST)
            assert plan.budget is not None
            taken = computed_passes(SHAPES, 4, on_gpu=False)(narrowest)
            over = buffers(PAIR, narrowest, 4, taken, on_gpu=False).total
            assert PAIR.weights + 5 * plan.block_bytes + over > plan.budget


def test_what_a_head_taps_of_the_target_is_counted() -> None:
    work, item = planned(memory=700_000_000).work, 4
    taken = computed_passes(SHAPES, item, on_gpu=False)(work)
    tapping = dataclasses.replace(PAIR, draft=dataclasses.replace(PAIR.draft, aux_layers=3))
    plain, headed = (buffers(pair, work, item, taken, on_gpu=False) for pair in (PAIR, tapping))
    aux_bytes = 3 * work.pass_tokens * SHAPES[0].hidden * item
    assert headed.prefill - plain.prefill >= aux_bytes
    assert headed.total >= plain.total


def test_a_plan_says_only_what_it_shrank() -> None:
    wide = dataclasses.replace(SHAPES[0], vocab=200_000)
    pair = dataclasses.replace(PAIR, target=wide, draft=DraftMemory(2_000_000, wide))
    plan = plan_memory(ReplicaConfig(memory=700_000_000, plan_rows=8), pair, CPU, loaded=True)
    assert (plan.rows_max, plan.draft_len_max(32)) == (None, 32)
    tight = plan_memory(ReplicaConfig(memory=plan.least), pair, CPU, loaded=True)
    assert tight.rows_max == tight.work.rows < plan.work.rows
    assert tight.draft_len_max(32) == 1
    alone = dataclasses.replace(PAIR, draft=DraftMemory())
    plain = plan_memory(ReplicaConfig(speculative_config="none"), alone, CPU, loaded=True)
    assert plain.work.draft_len == 0


def test_without_a_budget_a_share_of_what_is_free_beside_the_weights_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, 1_000_000_000)
    loaded, unloaded = planned(GPU), planned(GPU, loaded=False)
    assert loaded.budget == PAIR.weights + 900_000_000
    assert unloaded.budget == PAIR.weights + (1_000_000_000 - PAIR.weights) * 9 // 10
    twice = planned(CPU).buffers.prepacked  # it counts as weights
    assert planned(CPU).budget == PAIR.weights + twice + (1_000_000_000 - twice) // 10
    free(monkeypatch, 1_000)
    with pytest.raises(TooLittleMemory, match="90% of what is free beside the weights"):
        planned(GPU, loaded=False)


BILLION = 1_000_000_000


def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GB, of which others hold 30 and this process 12: 10 in use, 2 kept by torch for reuse."""
    sizes: dict[str, Any] = {"mem_get_info": (38 * BILLION, 80 * BILLION)}
    sizes |= {"memory_reserved": 12 * BILLION, "memory_allocated": 10 * BILLION}
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)


@pytest.mark.parametrize(("share", "free"), [(None, 40), (0.9, 40), (0.5, 30), (0.1, 0)], ids=str)
def test_a_gpus_free_memory_is_what_others_and_its_share_leave(
    share: float | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch)
    assert free_bytes(GPU, share or 1.0) == free * BILLION
    if free:
        plan = planned(GPU, gpu_memory_utilization=share)
        assert plan.budget == PAIR.weights + free * BILLION * 9 // 10
        assert plan.total <= plan.budget


def test_a_budget_over_what_a_gpu_has_free_is_refused_at_load_but_can_be_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_gpu(monkeypatch)
    config = ReplicaConfig(memory="41 GB", device="cuda")
    assert planned(GPU, memory="41 GB").total > 40 * BILLION
    with pytest.raises(TooLittleMemory, match=r"39101 MiB are given, but 38147 MiB are free on"):
        check_memory(config, read_pair(config).shape, GPU)
    check_memory(ReplicaConfig(memory="39 GB", device="cuda"), read_pair(config).shape, GPU)


# --------------------------------------------------------------------------- measured


def allocated(run: Callable[[], object], device: torch.device) -> int:
    """As `peak_bytes`; of a CPU, by what torch's profiler says of its allocator."""
    if device.type == "cuda":
        return peak_bytes(run, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    assert seen.profiler is not None
    kineto: Any = seen.profiler.kineto_results
    events = sorted((e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]")
    return int(max(accumulate(size for _, size in events)))


def passes(rows: int, draft_len: int, chunk: int, tokens: int) -> tuple[PassBytes, PassBytes]:
    """What the largest of a tiny target take, and the bounds."""
    pair = tiny_pair("llama")
    length = pair.context_len
    measured = measured_passes(pair.target, ReplicaConfig(block_size=4), length, allocated)
    work = Workload(rows, draft_len, 8, chunk, tokens, length, 4)
    return measured(work), computed_passes(pair.shape.models[:1], 4, on_gpu=True)(work)


def test_what_the_largest_passes_take_lies_within_the_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "PagedBackend", Kernels)
    interpreted = DEVICE == "cpu"  # which takes long
    for sizes in [(2, 1, 8, 32), *([] if interpreted else [(8, 4, 60, 256), (8, 8, 60, 400)])]:
        taken, bound = passes(*sizes)
        assert 0 < taken.step <= bound.step
        assert 0 < taken.prefill <= bound.prefill


def test_what_they_take_grows_with_them() -> None:
    sizes = ((1, 0, 8, 64), (4, 1, 32, 128), (8, 4, 60, 256), (8, 8, 60, 400))
    taken = [passes(*size)[0] for size in sizes]
    for what in ("step", "prefill"):
        grown = [getattr(size, what) for size in taken]
        assert grown == sorted(set(grown))


def test_a_plan_goes_by_what_was_measured_and_shrinks_where_a_device_has_no_room() -> None:
    pair = tiny_pair("llama")
    runs: list[int] = []

    def peak(run: Callable[[], object], device: torch.device) -> int:
        runs.append(allocated(run, device))
        if runs[-1] > 2_000_000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return runs[-1]

    config = ReplicaConfig(block_size=4, num_gpu_blocks_override=500, memory=BILLION)
    measured = measured_passes(pair.target, config, pair.context_len, peak)
    plan = plan_memory(config, pair.shape, GPU, loaded=True, passes=measured)
    assert max(runs) > 2_000_000
    assert plan.work != plan.wanted
    assert max(plan.buffers.step, plan.buffers.prefill) <= 2_000_000
    assert (plan.buffers.step, plan.buffers.prefill) == dataclasses.astuple(measured(plan.work))
    # A recording keeps what its pass takes.
    assert plan.buffers.recorded == plan.buffers.step


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_without_being_read_and_tied_ones_once(tied: bool) -> None:
    config = LlamaConfig(**{**SHAPE, "tie_word_embeddings": tied})
    model = LlamaForCausalLM(config)
    assert weight_bytes(without_storage(config, ReplicaConfig())) == weight_bytes(model)
    stored = {p.data_ptr(): p.numel() * 4 for p in model.parameters()}
    inverse_frequencies = sum(buffer.numel() * 4 for buffer in model.buffers())
    assert weight_bytes(model) == sum(stored.values()) + inverse_frequencies
    half = weight_bytes(without_storage(config, ReplicaConfig(dtype="bfloat16")))
    assert half - inverse_frequencies == sum(stored.values()) / 2


def test_too_small_a_budget_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    target = save_model(tmp_path / "t", WORDS, vocab_size=8)
    for weights in (tmp_path / "t").glob("*.safetensors"):
        weights.unlink()
    drafting = {"method": "draft_model", "model": target}
    config = ReplicaConfig(
        target=target, speculative_config=drafting, device="cpu", memory="100 kB"
    )
    with pytest.raises(TooLittleMemory, match="memory: 1 MiB do not hold the weights"):
        Replica.load(config)
    with pytest.raises(OSError, match="safetensors"):
        load_pair(config)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU measures what passes take: less than the bounds")
def test_a_replica_in_the_least_memory_serves_the_same_tokens() -> None:
    """Its spec tells the scheduler one row, and prompts go in narrow passes."""
    with pytest.raises(TooLittleMemory) as refused:
        tiny_replica("llama", num_gpu_blocks_override=None, memory=1)
    replica = tiny_replica("llama", num_gpu_blocks_override=None, memory=refused.value.least)
    assert (replica.spec.rows_max, replica.spec.kv_blocks) == (1, 64)
    engine = LocalEngine(replica, SchedulerConfig(), check=True)
    prompts = [tuple(range(3, 3 + length)) for length in (5, 90, 20)]
    outputs = engine.generate([Request(str(i), prompt, 12) for i, prompt in enumerate(prompts)])
    assert {len(result.rows) for result in engine.results} == {1}
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.tokens == plain_greedy(target_model("llama"), prompt, 12)
