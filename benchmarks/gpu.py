"""A big pair on one device, beside what the device could do at best. Runs from a plain checkout.

    python -m benchmarks.gpu [--shape qwen3-8b] [--json FILE]   on a GPU: Qwen3-8B / 0.6B, bfloat16
    python -m benchmarks.gpu --shape tiny                       anywhere, within a minute

A planted pair (random weights in real shapes, see `replicas.planted`) is decoded without and with
speculation at several batch sizes, by transformers' `generate`, prefilled, and decoded again in the
deterministic mode and, on a GPU, without CUDA graphs and with each kind of attention that can be
had there, with the middle one of the draft lengths. Two ceilings stand beside each figure: the
bytes that it had to read over the measured copy bandwidth, and its operations over the measured
matrix rate.

Outputs of a mode are compared with its own without speculation: those of requests that ran alone,
one after the other, in the modes of ALONE, else those at the smallest batch. How many of them were
compared with outputs of groups of another size is told apart: only these say whether the batch
matters, and only the deterministic mode promises that it does not. Needs neither Ray nor gRPC.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.ceilings import measure_rates
from benchmarks.device_runs import GENERATE_BATCH, TRANSFORMERS, Bench, Run
from benchmarks.report import machine, table, write_json
from replicas.config import ReplicaConfig
from replicas.pair import Pair, PairRefused, load_pair, resolve_device
from replicas.replica import Replica
from replicas.shapes import DRAFTS
from scheduler.messages import Request

_BLOCK_SIZE = 16
ATTENTIONS = {
    "gather": ("gather", _BLOCK_SIZE),
    "flex": ("flex", _BLOCK_SIZE),
    "flex-128": ("flex", 128),
    "varlen-256": ("varlen", 256),
}
"""Modes that differ in the attention alone: its kind and KV positions per block."""
USUAL, DETERMINISTIC = "plain", "deterministic"
ALONE = (USUAL, DETERMINISTIC)
"""Modes whose requests run alone as well: the one that promises equality, and the same without."""


def random_requests(n: int, vocab: int, prompt_tokens: int, new_tokens: int) -> list[Request]:
    """Prompts of random ids, from half to the whole of `prompt_tokens` long."""
    rng = random.Random(0)
    lengths = [rng.randint(max(2, prompt_tokens // 2), prompt_tokens) for _ in range(n)]
    return [
        Request(str(i), tuple(rng.randrange(vocab) for _ in range(length)), new_tokens)
        for i, length in enumerate(lengths)
    ]


def figures(runs: Sequence[Run], usual: str) -> dict[str, float]:
    """What a reader asks first; shares are of the lower ceiling."""
    by_key = {(run.mode, run.batch, run.draft_len): run for run in runs}
    out: dict[str, float] = {}
    for batch in sorted({run.batch for run in runs}):
        plain = by_key.get((usual, batch, 0))
        if plain and plain.bandwidth_ceiling and plain.matrix_ceiling:
            lower = min(plain.bandwidth_ceiling, plain.matrix_ceiling)
            out[f"k = 0 at batch {batch}, share of the ceiling"] = plain.tokens_per_s / lower
        spec = [r for r in runs if r.mode == usual and r.batch == batch and r.draft_len > 0]
        if spec and plain:
            best = max(spec, key=lambda run: run.over_plain or 0.0)
            out[f"speculation (k = {best.draft_len}) over k = 0, batch {batch}"] = (
                best.over_plain or 0.0
            )
        for mode in ATTENTIONS:
            for run in (r for r in runs if r.mode == mode and r.batch == batch):
                same = by_key.get((usual, batch, run.draft_len))
                if same:
                    out[f"{mode} over {usual}, batch {batch}, k = {run.draft_len}"] = (
                        run.tokens_per_s / same.tokens_per_s
                    )
        slow = by_key.get((DETERMINISTIC, batch, 0))
        if slow and plain:
            out[f"deterministic over {usual}, batch {batch}, k = 0"] = (
                slow.tokens_per_s / plain.tokens_per_s
            )
    for mode in ALONE:
        own = [run.outputs for run in runs if run.mode == mode]
        across = sum(outputs.compared_across for outputs in own)
        if across:
            out[f"{mode}: outputs compared with another batch size"] = float(across)
            out[f"{mode}: share of them identical"] = (
                sum(outputs.identical_across for outputs in own) / across
            )
    theirs = by_key.get((TRANSFORMERS, GENERATE_BATCH, 0))
    ours = [r.all_tokens_per_s for r in runs if r.mode == usual and r.batch == GENERATE_BATCH]
    if theirs and ours:
        out[f"over transformers' generate, batch {GENERATE_BATCH}"] = (
            max(ours) / theirs.all_tokens_per_s
        )
    return out


def kv_blocks(rows: int, context_len: int, block_size: int) -> int:
    """Blocks that so many rows need, with one each to spare."""
    return rows * (-(-context_len // block_size) + 1)


def attention_modes(
    pair: Pair, config: ReplicaConfig, names: Sequence[str], rows: int
) -> dict[str, Replica]:
    """A replica per mode of ATTENTIONS; those that cannot be had here are named and left out."""
    modes = {}
    for name in names:
        kind, block_size = ATTENTIONS[name]
        blocks = kv_blocks(rows, pair.context_len, block_size)
        own = {"attention": kind, "block_size": block_size, "kv_blocks": blocks}
        try:
            modes[name] = Replica(pair, config.model_copy(update=own))
        except PairRefused as refused:
            print(f"{name}: {refused}", flush=True)
    return modes


def main() -> None:
    """Parse the command line, run everything, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(DRAFTS))
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1 8 16 64")
    parser.add_argument("--draft-lens", type=int, nargs="+", help="default: 2 4 6")
    parser.add_argument("--draft-batch-max", type=int, default=16, help="no speculation above it")
    parser.add_argument("--prompt-tokens", type=int, default=None)
    parser.add_argument("--new-tokens", type=int, default=None)
    parser.add_argument("--rounds", type=int, help="after one that warms up; default: 2")
    parser.add_argument("--no-deterministic", action="store_true")
    parser.add_argument(
        "--alone", type=int, default=8, help="requests that run alone, to compare outputs with"
    )
    parser.add_argument(
        "--attention",
        nargs="*",
        choices=sorted(ATTENTIONS),
        help="kinds to run beside the one that is chosen; default: all on a GPU, none on a CPU",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    tiny = args.shape == "tiny"
    prompt_tokens = args.prompt_tokens or (24 if tiny else 256)
    new_tokens = args.new_tokens or (16 if tiny else 128)
    batches = sorted(args.batches or ([1, 4] if tiny else [1, 8, 16, 64]))
    draft_lens = args.draft_lens or ([3] if tiny else [2, 4, 6])
    rounds = args.rounds or (1 if tiny else 2)
    device = resolve_device(args.device)
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    rates = measure_rates(device, getattr(torch, dtype))
    rows = max(*batches, GENERATE_BATCH)
    context_len = prompt_tokens + new_tokens
    config = ReplicaConfig(
        target=f"planted:{args.shape}?acceptance={args.acceptance}",
        draft=f"planted:{DRAFTS[args.shape]}",
        device=str(device),
        dtype=dtype,
        block_size=_BLOCK_SIZE,
        context_len=context_len,
        # Or prompts would be filled in the first round only.
        prefix_sharing=False,
        calibrate=False,
        kv_blocks=kv_blocks(rows, context_len, _BLOCK_SIZE),
        plan_rows=rows,
        plan_draft_len=max(draft_lens),
    )
    pair = load_pair(config)
    planted = pair.target.config
    described = {
        **machine(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "copy_gb_per_s": rates.bytes_per_s / 1e9,
        "matrix_tflop_per_s": rates.operations_per_s / 1e12,
    }
    print(described)
    print(f"{config.target}: follows the map at {planted.planted_follows:.3f}", flush=True)
    modes = {USUAL: Replica(pair, config)}
    if device.type == "cuda":
        modes["eager"] = Replica(pair, config.model_copy(update={"graphs": "off"}))
    beside = args.attention
    if beside is None:
        beside = list(ATTENTIONS) if device.type == "cuda" else []
    modes |= attention_modes(pair, config, beside, rows)
    if not args.no_deterministic:
        # The same weights, without calibrating again.
        name = f"planted:{args.shape}?scale={planted.planted_scale!r}"
        fixed = config.model_copy(update={"target": name, "deterministic": True})
        modes[DETERMINISTIC] = Replica.load(fixed)
    attention = {mode: replica.attention for mode, replica in modes.items()}
    bench = Bench(pair, rates, random_requests(rows, pair.vocab_size, prompt_tokens, new_tokens))
    for round_ in range(rounds + 1):
        for batch in batches:
            for mode, replica in modes.items():
                if mode == "eager" and round_ == 0:
                    continue  # it records nothing, so it needs no round to warm up
                lens = draft_lens if mode == USUAL else draft_lens[len(draft_lens) // 2 :][:1]
                for draft_len in (0, *(lens if batch <= args.draft_batch_max else ())):
                    bench.lockstep(mode, replica, batch, draft_len)
        bench.generate(pair)
        if round_ == 0:
            bench.forget()
    for mode in ALONE:
        if mode in modes:
            bench.alone(mode, modes[mode], args.alone)
    runs, prefills = bench.runs(), bench.prefills()
    summary = figures(runs, USUAL)
    print(run_table(runs))
    print(
        table(
            ("mode", "target's attention", "draft's"),
            [(mode, kinds["target"], kinds["draft"]) for mode, kinds in attention.items()],
        )
    )
    print(table(list(asdict(prefills[0])), [list(asdict(p).values()) for p in prefills]))
    print(table(("figure", "value"), list(summary.items())))
    write_json(
        args.json,
        {
            "device": described,
            "pair": {"target": config.target, "draft": config.draft},
            "follows": planted.planted_follows,
            "scale": planted.planted_scale,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "rounds": rounds,
            "attention": attention,
            "figures": summary,
            "prefill": [asdict(prefill) for prefill in prefills],
            "runs": [asdict(run) for run in runs],
        },
    )


def run_table(runs: Sequence[Run]) -> str:
    """One line per run; the shares of the two ceilings stand in brackets. The last column counts
    only outputs compared with those of groups of another size."""

    def beside(ceiling: float | None, rate: float) -> str:
        return "" if ceiling is None else f"{ceiling:.0f} ({rate / ceiling:.0%})"

    return table(
        (
            "mode",
            "batch",
            "k",
            "tokens/s",
            "ms/step",
            "tokens/row/step",
            "bandwidth ceiling",
            "matrix ceiling",
            "over k = 0",
            "with prefill",
            "identical",
            "of another batch size",
        ),
        [
            (
                run.mode,
                run.batch,
                run.draft_len,
                run.tokens_per_s,
                "" if run.step_ms is None else run.step_ms,
                "" if run.committed is None else run.committed,
                beside(run.bandwidth_ceiling, run.tokens_per_s),
                beside(run.matrix_ceiling, run.tokens_per_s),
                "" if run.over_plain is None else run.over_plain,
                run.all_tokens_per_s,
                f"{run.outputs.identical}/{run.outputs.compared}",
                f"{run.outputs.identical_across}/{run.outputs.compared_across}",
            )
            for run in runs
        ],
    )


if __name__ == "__main__":
    main()
