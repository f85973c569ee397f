"""A big pair on one device, beside what the device could do at best. Runs from a plain checkout.

    python -m benchmarks.gpu [--shape qwen3-8b] [--json FILE]   on a GPU: Qwen3-8B / 0.6B, bfloat16
    python -m benchmarks.gpu --shape tiny                       anywhere, within a minute

A planted pair (random weights in real shapes, see `replicas.models.planted`) is decoded without and
with speculation at several batch sizes, by transformers' `generate`, prefilled, and decoded again,
on a GPU, without CUDA graphs and with each kind of attention that can be had there, and in the
deterministic mode, with the middle one of the draft lengths. Two ceilings stand beside each figure:
the bytes that it had to read over the measured copy bandwidth, and its operations over the measured
matrix rate.

One mode follows the other. Live together are the pair, one replica of it (KV cache, recordings) and
in the first mode what `generate` takes, which runs in each of that replica's rounds. The replica is
freed before the next is made, and the pair before the deterministic mode loads its own. Draft
lengths of one mode alternate on one replica; ratios between modes are of one process, not of one
moment.

A mode that fails is reported, and the others run; the exit status is 1 then, but for kinds of
attention that nobody has named. The JSON file is written anew after every mode, and after every
round of the first; `complete` in it says whether all have had their turn.

Outputs of a mode are compared with its own without speculation: those of requests that ran alone,
one after the other, in the modes of ALONE, else those at the smallest batch. How many of them were
compared with outputs of groups of another size is told apart: only these say whether the batch
matters, and only the deterministic mode promises that it does not. Needs neither Ray nor gRPC.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.ceilings import Rates, measure_rates
from benchmarks.device_modes import (
    ATTENTIONS,
    BLOCK_SIZE,
    DETERMINISTIC,
    EAGER,
    FAILED,
    USUAL,
    WAITING,
    Outcome,
    Plan,
    attempt,
    free,
    made,
)
from benchmarks.device_report import Report
from benchmarks.device_runs import GENERATE_BATCH, TRANSFORMERS, Bench
from benchmarks.report import machine
from replicas.config import ReplicaConfig
from replicas.models.pair import load_pair, resolve_device
from replicas.models.shapes import DRAFTS
from replicas.replica import Replica
from scheduler.messages import Request


def random_requests(n: int, vocab: int, prompt_tokens: int, new_tokens: int) -> list[Request]:
    """Prompts of random ids, from half to the whole of `prompt_tokens` long."""
    rng = random.Random(0)
    lengths = [rng.randint(max(2, prompt_tokens // 2), prompt_tokens) for _ in range(n)]
    return [
        Request(str(i), tuple(rng.randrange(vocab) for _ in range(length)), new_tokens)
        for i, length in enumerate(lengths)
    ]


def kv_blocks(rows: int, context_len: int, block_size: int) -> int:
    """Blocks that so many rows need, with one each to spare."""
    return rows * (-(-context_len // block_size) + 1)


def of_one_pair(
    configs: dict[str, ReplicaConfig],
    report: Report,
    plan: Plan,
    rates: Rates,
    tokens: tuple[int, int],
) -> float:
    """Run the modes of `configs`, which share a pair; it is dropped with this call. `tokens` are
    those of the longest prompt and of an output. Returns the scale of the pair's noise."""
    config = configs[USUAL]
    pair = load_pair(config)
    planted = pair.target.config
    print(f"{config.target}: follows the map at {planted.planted_follows:.3f}", flush=True)
    report.about |= {"follows": planted.planted_follows, "scale": planted.planted_scale}
    requests = random_requests(max(*plan.batches, GENERATE_BATCH), pair.vocab_size, *tokens)
    for mode in report.modes:
        if mode != TRANSFORMERS:
            # Of the deterministic mode as well, whose own pair has the same sizes.
            report.benches[mode] = Bench(pair, rates, requests)
    report.write()
    theirs = report.modes[TRANSFORMERS]

    def generate() -> None:
        if theirs.state == FAILED:
            return
        try:
            report.benches[USUAL].generate(pair)
            theirs.end()
        except Exception as error:
            theirs.end(error)
            print(f"{TRANSFORMERS}: failed: {theirs.message}", flush=True)

    for mode, own in configs.items():

        def make(own: ReplicaConfig = own) -> Replica:
            return made(pair, own)

        outcome, bench = report.modes[mode], report.benches[mode]
        if mode == USUAL:
            # It takes longest: what is cut off within it keeps the rounds that it had.
            attempt(mode, outcome, pair.device, make, bench, plan, [generate], report.write)
        else:
            attempt(mode, outcome, pair.device, make, bench, plan)
        if theirs.state == WAITING:
            theirs.end(RuntimeError(f"{USUAL}, beside which it runs, failed before"))
        report.write()
    return float(planted.planted_scale)


def exit_status(modes: Mapping[str, Outcome], tried: Collection[str]) -> int:
    """1 if a mode failed, but for those that were only tried."""
    failed = {mode for mode, outcome in modes.items() if outcome.state == FAILED}
    return 1 if failed.difference(tried) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run everything, print the tables; returns the exit status."""
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
    args = parser.parse_args(argv)

    tiny = args.shape == "tiny"
    prompt_tokens = args.prompt_tokens or (24 if tiny else 256)
    new_tokens = args.new_tokens or (16 if tiny else 128)
    batches = sorted(args.batches or ([1, 4] if tiny else [1, 8, 16, 64]))
    draft_lens = args.draft_lens or ([3] if tiny else [2, 4, 6])
    rounds = args.rounds or (1 if tiny else 2)
    device = resolve_device(args.device)
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    rates = measure_rates(device, getattr(torch, dtype))
    free(device)
    rows = max(*batches, GENERATE_BATCH)
    context_len = prompt_tokens + new_tokens
    config = ReplicaConfig(
        target=f"planted:{args.shape}?acceptance={args.acceptance}",
        draft=f"planted:{DRAFTS[args.shape]}",
        device=str(device),
        dtype=dtype,
        block_size=BLOCK_SIZE,
        context_len=context_len,
        # Or prompts would be filled in the first round only.
        prefix_sharing=False,
        calibrate=False,
        kv_blocks=kv_blocks(rows, context_len, BLOCK_SIZE),
        plan_rows=rows,
        plan_draft_len=max(draft_lens),
    )
    described = {
        **machine(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "copy_gb_per_s": rates.bytes_per_s / 1e9,
        "matrix_tflop_per_s": rates.operations_per_s / 1e12,
    }
    print(described, flush=True)
    kinds = args.attention
    if kinds is None:
        kinds = list(ATTENTIONS) if device.type == "cuda" else []
    configs = {USUAL: config}
    if device.type == "cuda":
        configs[EAGER] = config.model_copy(update={"graphs": "off"})
    for name in kinds:
        kind, block_size = ATTENTIONS[name]
        blocks = kv_blocks(rows, context_len, block_size)
        own = {"attention": kind, "block_size": block_size, "kv_blocks": blocks}
        configs[name] = config.model_copy(update=own)
    modes = [USUAL, TRANSFORMERS, *list(configs)[1:]]
    if not args.no_deterministic:
        modes.append(DETERMINISTIC)
    report = Report(
        args.json,
        {
            "device": described,
            "pair": {"target": config.target, "draft": config.draft},
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "rounds": rounds,
        },
        {mode: Outcome() for mode in modes},
    )
    plan = Plan(batches, draft_lens, args.draft_batch_max, rounds, args.alone)
    scale = of_one_pair(configs, report, plan, rates, (prompt_tokens, new_tokens))
    free(device)  # of the pair, before another is loaded
    if DETERMINISTIC in report.modes:
        # The same weights, without calibrating again.
        name = f"planted:{args.shape}?scale={scale!r}"
        fixed = config.model_copy(update={"target": name, "deterministic": True})
        outcome, bench = report.modes[DETERMINISTIC], report.benches[DETERMINISTIC]
        attempt(DETERMINISTIC, outcome, device, lambda: Replica.load(fixed), bench, plan)
        report.write()
    report.show()
    return exit_status(report.modes, ATTENTIONS if args.attention is None else ())


if __name__ == "__main__":
    sys.exit(main())
