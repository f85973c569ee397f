"""The engine alone, in one process: speculation against plain decoding and against transformers.

    python -m benchmarks.engine [--prompts FILE] [--target T --draft D] [--json FILE]

One run, the same prompts everywhere: Lockstep at batch 1, 8, ... and several draft lengths,
transformers' `generate` of the target at the same batch size, and whether all outputs are equal.
Needs no Ray.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.prompts import benchmark_tokens
from benchmarks.report import machine, table, write_json
from cluster.local_engine import LocalEngine, Output
from replicas.config import ReplicaConfig
from replicas.pair import resolve
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, SamplingParams


@dataclass(frozen=True)
class Run:
    """One configuration over all prompts."""

    name: str
    batch: int
    draft_len: int
    temperature: float
    seconds: float
    tokens_per_s: float
    committed_per_step: float
    """Tokens per row and step."""
    overhead: float | None
    """Share of the steps' time that is neither draft nor target forward."""
    padding: float | None
    """Share of KV positions read beyond a row's own."""
    between_orders: float | None
    """Share of the run's wall time outside the replica: the scheduler, above all.

    The last three are unknown (None) for transformers."""


def lockstep_run(
    replica: Replica, requests: Sequence[Request], batch: int, draft_len: int
) -> tuple[Run, list[Output]]:
    """Run all requests to their end; all are submitted at the start."""
    engine = LocalEngine(replica, SchedulerConfig(rows_max=batch, draft_len=draft_len))
    start = perf_counter()
    outputs = engine.generate(requests)
    seconds = perf_counter() - start
    stepped = [result for result in engine.results if result.steps]
    in_steps = sum(result.times.total_s for result in stepped)
    forward = sum(
        result.times.draft_s + result.times.verify_s + result.times.prefill_s for result in stepped
    )
    inside = sum(result.times.total_s for result in engine.results)
    row_steps = sum(row.steps for result in stepped for row in result.rows)
    tokens = sum(len(output.tokens) for output in outputs)
    own = sum(result.kv_positions_own for result in stepped)
    read = sum(result.kv_positions_read for result in stepped)
    temperature = requests[0].sampling.temperature
    run = Run(
        name=f"Lockstep, k = {draft_len}",
        batch=batch,
        draft_len=draft_len,
        temperature=temperature,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        committed_per_step=sum(len(r.tokens) for x in stepped for r in x.rows) / row_steps,
        overhead=1 - forward / in_steps,
        padding=1 - own / read,
        between_orders=1 - inside / seconds,
    )
    return run, outputs


def transformers_run(
    model: Any, requests: Sequence[Request], batch: int
) -> tuple[Run, list[list[int]]]:
    """transformers' `generate` in batches of neighbours in length, padded on the left."""
    ordered = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    outputs: list[list[int]] = [[] for _ in requests]
    device = model.device
    start = perf_counter()
    for begin in range(0, len(ordered), batch):
        members = ordered[begin : begin + batch]
        prompts = [requests[i].prompt for i in members]
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=requests[members[0]].max_new_tokens,
            do_sample=False,
        )
        for row, i in enumerate(members):
            outputs[i] = out[row, width:].tolist()
    seconds = perf_counter() - start
    tokens = sum(map(len, outputs))
    name = "transformers generate"
    run = Run(name, batch, 0, 0.0, seconds, tokens / seconds, 1.0, None, None, None)
    return run, outputs


def main() -> None:
    """Parse the command line, run everything, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=Path, help="JSON lines with `prompt` or `turns`")
    parser.add_argument("--limit", type=int, default=64, help="number of prompts")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[0, 3, 4, 6])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=None, help="torch's intra-op threads")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    config = ReplicaConfig(
        target=args.target,
        draft=args.draft,
        device=args.device,
        dtype=args.dtype,
        torch_threads=args.threads,
    )
    replica = Replica.load(config)
    tokenizer = AutoTokenizer.from_pretrained(resolve(args.target))
    plain = AutoModelForCausalLM.from_pretrained(
        resolve(args.target), dtype=getattr(torch, args.dtype)
    )
    plain.to(replica.spec.device).eval()
    plain.generation_config = GenerationConfig(pad_token_id=0)
    prompts = benchmark_tokens(
        tokenizer, args.limit, args.prompts, replica.spec.context_len - args.new_tokens
    )
    requests = [Request(str(i), tuple(tokens), args.new_tokens) for i, tokens in enumerate(prompts)]
    described = machine() | {"threads": torch.get_num_threads()}
    print(described)
    lockstep_run(replica, requests[:8], 8, 4)  # warm-up
    transformers_run(plain, requests[:8], 8)

    runs: list[Run] = []
    references: list[list[int]] = []
    identical: dict[str, int] = {}
    for batch in args.batches:
        run, tokens = transformers_run(plain, requests, batch)
        _show(runs, run)
        references = references or tokens  # batch 1 is the reference, if it is measured
        identical[f"transformers generate, batch {batch}"] = _equal(tokens, references)
        for draft_len in args.draft_lens:
            run, outputs = lockstep_run(replica, requests, batch, draft_len)
            _show(runs, run)
            identical[f"greedy, batch {batch}, k = {draft_len}"] = _equal(
                [output.tokens for output in outputs], references
            )
    sampled = [
        replace(request, sampling=SamplingParams(temperature=1.0, top_p=0.95, seed=i))
        for i, request in enumerate(requests)
    ]
    references = []
    for batch, draft_len in ((1, 0), (1, 4), (8, 0), (8, 4), (16, 4)):
        run, outputs = lockstep_run(replica, sampled, batch, draft_len)
        _show(runs, run)
        tokens = [output.tokens for output in outputs]
        references = references or tokens
        identical[f"sampled, batch {batch}, k = {draft_len}"] = _equal(tokens, references)

    figures = summary(runs)
    print(table(("figure", "value"), list(figures.items())))
    print(table((f"identical outputs of {len(requests)}", "value"), list(identical.items())))
    write_json(
        args.json,
        {
            "threads": torch.get_num_threads(),
            "prompts": len(requests),
            "prompt_tokens": [len(request.prompt) for request in requests],
            "new_tokens": args.new_tokens,
            "figures": figures,
            "identical": identical,
            "runs": [asdict(run) for run in runs],
        },
    )


def summary(runs: Sequence[Run]) -> dict[str, float | None]:
    """The ratios that matter, from the greedy runs of one session."""
    lockstep = [run for run in runs if run.name.startswith("Lockstep") and run.temperature == 0]
    batches = sorted({run.batch for run in lockstep})
    best = {
        b: max((run for run in lockstep if run.batch == b), key=lambda run: run.tokens_per_s)
        for b in batches
    }
    plain = {run.batch: run for run in lockstep if run.draft_len == 0}
    hf = {run.batch: run for run in runs if run.name.startswith("transformers")}
    figures: dict[str, float | None] = {}
    for b in batches:
        figures[f"best k at batch {b}"] = best[b].draft_len
        figures[f"tokens/s at batch {b}"] = best[b].tokens_per_s
        if b in plain:
            figures[f"best k over k = 0, batch {b}"] = best[b].tokens_per_s / plain[b].tokens_per_s
        figures[f"over transformers' generate, batch {b}"] = (
            best[b].tokens_per_s / hf[b].tokens_per_s
        )
        figures[f"neither draft nor target forward, batch {b}"] = best[b].overhead
        figures[f"padding, batch {b}"] = best[b].padding
        if b != batches[0]:
            figures[f"batch {b} over batch {batches[0]}"] = (
                best[b].tokens_per_s / best[batches[0]].tokens_per_s
            )
    return figures


def _equal(outputs: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> int:
    return sum(list(a) == list(b) for a, b in zip(outputs, references, strict=True))


def _show(runs: list[Run], run: Run) -> None:
    runs.append(run)
    line = (
        f"{run.name:24} batch {run.batch:2}  T {run.temperature:.1f}  {run.tokens_per_s:7.0f}"
        f" tokens/s  {run.committed_per_step:5.2f} tokens/row/step"
    )
    if run.overhead is not None:
        line += (
            f"  overhead {run.overhead:6.1%}  padding {run.padding:6.1%}"
            f"  between orders {run.between_orders:6.1%}"
        )
    print(line, flush=True)


if __name__ == "__main__":
    main()
