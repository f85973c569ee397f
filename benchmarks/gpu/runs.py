"""What the GPU benchmark runs in each of its modes, and what it notes of it."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import mean
from time import perf_counter

import torch

from benchmarks.gpu.ceilings import ModelWork, Rates
from benchmarks.shared.transformers_runs import Transformers
from cluster.bench.workload import synthetic_prompts
from cluster.local.engine import LocalEngine
from replicas.config import ReplicaConfig
from replicas.drafters.model import ModelSource
from replicas.pair import Pair, load_pair
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from scheduler.simulation import uniform

USUAL, TRANSFORMERS, HEAD = "plain", "transformers", "head"
GENERATE_BATCH = 8
"""Rows of a batch of transformers' `generate`."""
REQUESTS_LEAST = 2
"""Requests of a run at the smallest batch sizes."""
_MESSAGE_MOST = 300
"""Characters: a compiler's messages go on for pages."""


@dataclass(frozen=True)
class Run:
    """One batch size and draft length in one round, or the median of the rounds."""

    tokens_per_s: float
    """Of the steps alone, prefill left out; of transformers over the whole run."""
    all_tokens_per_s: float
    """Prefill and scheduler included."""
    ceiling: float
    """`tokens_per_s` if nothing but memory traffic, or operations, took time; prefill left out."""
    step_ms: float | None = None
    committed: float | None = None
    """Tokens per row and step."""
    draft_share: float | None = None
    verify_share: float | None = None
    """Shares of the steps' time."""
    prefill_tokens_per_s: float | None = None


@dataclass
class Mode:
    """What a mode runs with, and what became of it."""

    config: ReplicaConfig
    state: str = "waiting"
    """Or "measured" or "failed"."""
    message: str = ""
    """Why it failed, in one line."""
    memory_gb: float | None = None
    """Of a GPU, the most that torch had taken at any time in this mode, weights included."""
    alone: list[list[int]] = field(default_factory=list)
    """Outputs of requests that ran alone."""
    outputs: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)
    """By batch size and draft length, of the last round."""
    rounds: dict[tuple[int, int], list[Run]] = field(default_factory=dict)
    """The same of all rounds but the first, which warms up."""


def random_requests(n: int, vocab: int, prompt_tokens: int, new_tokens: int) -> list[Request]:
    """Prompts of random ids, from half to the whole of `prompt_tokens` long."""
    lengths = uniform(max(2, prompt_tokens // 2), prompt_tokens)
    prompts = synthetic_prompts(n, lengths, vocab, seed=0)
    return [Request(str(i), prompt, new_tokens) for i, prompt in enumerate(prompts)]


def lockstep(
    replica: Replica, pair: Pair, rates: Rates, requests: Sequence[Request], batch: int, k: int
) -> tuple[Run, list[list[int]]]:
    """Run all requests, submitted at once, with `k` draft tokens; their outputs too."""
    engine = LocalEngine(replica, SchedulerConfig(rows_max=batch, draft_len=k))
    start = perf_counter()
    outputs = [output.tokens for output in engine.generate(requests)]
    seconds = perf_counter() - start
    stepped = [result for result in engine.results if result.steps]
    rows = [row for result in stepped for row in result.rows]
    steps = sum(result.steps for result in stepped)
    # A step drafts as far as the row that may go furthest.
    drafted = sum(max(row.draft_tokens for row in result.rows) for result in stepped)
    committed = sum(len(row.tokens) for row in rows)
    row_steps = sum(row.steps for row in rows)
    # On the average a row reads its prompt and half of its new tokens.
    lengths = [len(request.prompt) + request.max_new_tokens / 2 for request in requests]
    positions = row_steps * mean(lengths)
    verified = row_steps + sum(row.draft_tokens for row in rows)
    lengths = [len(request.prompt) - 1 for request in requests]
    least_s = ModelWork.of(pair.target).least_s(rates, steps, verified, positions)
    if isinstance(pair.draft, ModelSource):
        draft = ModelWork.of(pair.draft.model)
        read = positions * drafted / max(steps, 1)
        least_s += draft.least_s(rates, drafted, verified - row_steps, read)
    in_steps = sum(result.times.total_s for result in stepped)
    in_fills = sum(result.times.total_s for result in engine.results if not result.steps)
    run = Run(
        tokens_per_s=committed / in_steps,
        all_tokens_per_s=sum(map(len, outputs)) / seconds,
        ceiling=committed / least_s,
        step_ms=1e3 * in_steps / steps,
        committed=committed / row_steps,
        draft_share=sum(result.times.draft_s for result in stepped) / in_steps,
        verify_share=sum(result.times.verify_s for result in stepped) / in_steps,
        prefill_tokens_per_s=sum(lengths) / in_fills,
    )
    return run, outputs


def generate(pair: Pair, rates: Rates, requests: Sequence[Request]) -> tuple[Run, list[list[int]]]:
    """transformers' own `generate` over the target, with its own attention."""
    pair.target.set_attn_implementation("sdpa")
    ours = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(True)  # as it would run without Lockstep
    try:
        start = perf_counter()
        outputs = Transformers(pair.target, None).batched(requests, len(requests))
        seconds = perf_counter() - start
    finally:
        torch.backends.cuda.enable_cudnn_sdp(ours)
    tokens = sum(map(len, outputs))
    # The pass over the prompts yields the first token of each.
    passes, rows = requests[0].max_new_tokens - 1, len(requests)
    positions = sum(len(request.prompt) + n for request in requests for n in range(1, passes + 1))
    least_s = ModelWork.of(pair.target).least_s(rates, passes, passes * rows, positions)
    speed = tokens / seconds
    return Run(speed, speed, tokens / least_s), outputs


def measure(name: str, mode: Mode, args: argparse.Namespace, rates: Rates) -> dict[str, float]:
    """All rounds of a mode, noted in it. What the pair's calibration has found."""
    pair = load_pair(mode.config)
    most = max(*args.batches, GENERATE_BATCH, args.alone)
    requests = random_requests(most, pair.vocab_size, args.prompt_tokens, args.new_tokens)
    if name == TRANSFORMERS:
        keys, replica = [(GENERATE_BATCH, 0)], None
    else:
        lens = args.draft_lens
        if name not in (USUAL, HEAD):
            lens = [lens[len(lens) // 2]]
        keys = [
            (batch, k)
            for batch in args.batches
            for k in (0, *(lens if batch <= args.draft_batch_max else ()))
        ]
        replica = Replica(pair, mode.config)
        for request in requests[: args.alone]:
            mode.alone += lockstep(replica, pair, rates, [request], 1, 0)[1]
    for number in range(args.rounds + 1):
        for batch, k in keys:
            some = requests[: max(batch, REQUESTS_LEAST)]
            if replica is None:
                run, outputs = generate(pair, rates, some)
            else:
                run, outputs = lockstep(replica, pair, rates, some, batch, k)
            print(f"{name:18} batch {batch:3}  k {k}  {run.tokens_per_s:8.0f} tokens/s", flush=True)
            if number:
                mode.rounds.setdefault((batch, k), []).append(run)
                mode.outputs[batch, k] = outputs
    planted = pair.target.config
    return {"follows": planted.planted_follows, "scale": planted.planted_scale}


def attempt(name: str, mode: Mode, args: argparse.Namespace, rates: Rates) -> dict[str, float]:
    """Measure a mode and say in it what became of it; nothing of it stays on the device."""
    device, about = torch.device(mode.config.device), {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        about = measure(name, mode, args, rates)
        mode.state = "measured"
    except Exception as error:  # a kernel or its compiler may raise anything
        mode.state = "failed"
        mode.message = one_line(f"{type(error).__name__}: {error}")
        print(f"{name}: {mode.state}: {mode.message}", flush=True)
    if device.type == "cuda":
        mode.memory_gb = torch.cuda.max_memory_reserved(device) / 1e9
    free(device)
    return about


def one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MESSAGE_MOST else f"{text[: _MESSAGE_MOST - 4]} ..."


def free(device: torch.device) -> None:
    """Give the device what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        # A device that an error has broken refuses this, too; the next mode will say so.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
