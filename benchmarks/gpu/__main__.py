"""A big pair on one device, beside what the device could do at best. Runs from a plain checkout.

    python -m benchmarks.gpu [--shape qwen3-8b] [--json FILE]   on a GPU: Qwen3-8B / 0.6B, bfloat16
    python -m benchmarks.gpu --shape tiny                       anywhere, within a minute

A planted pair (random weights in real shapes, see `replicas.models.weights`) is decoded at several
batch sizes with and without speculation, in one mode after the other:

    the draft model as it is used by default
    transformers' `generate`
    a planted head
    on a GPU: without CUDA graphs
    the deterministic mode, with the draft model and with the head

Each mode loads what it needs, and its draft lengths take turns on one replica. Modes are compared
within one process, but not at one moment: a device that slows down shows in the ratios.

A ceiling stands beside each figure: what the bytes that it had to read would take at the measured
copy bandwidth, or its operations at the measured matrix rate, whichever is longer. Prefill and a
head's own work are left out.

The first `--alone` requests run once more in each mode, one after the other and with k = 0;
`identical` counts the outputs of a run that equal those. Only the deterministic mode promises that
all do.

A mode that fails is reported, and the others run; the exit status is 1 then. The JSON file is
written anew after every mode. Needs neither Ray nor gRPC.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.ceilings import measure_rates
from benchmarks.gpu.quick import quick
from benchmarks.gpu.runs import GENERATE_BATCH, HEAD, TRANSFORMERS, USUAL, Mode, attempt, free
from benchmarks.shared.command_line import parser_of
from benchmarks.shared.measured import medians
from benchmarks.shared.report import machine, table, write_json
from replicas.config import ReplicaConfig, SpeculativeConfig
from replicas.drafters.eagle3.planted_head import PLANTED_HEAD
from replicas.models import resolve_device
from replicas.names import DRAFTS

BLOCK_SIZE = 16
EAGER = "eager"
DETERMINISTIC, DETERMINISTIC_HEAD = "deterministic", "deterministic head"
TOLD = ("state", "memory_gb", "message")
"""Of a mode, in the JSON file."""


def rows_of(modes: dict[str, Mode]) -> list[dict[str, Any]]:
    """A row per mode, batch size and draft length. `over_plain` is the speed over that with
    k = 0 of the same mode and round, `over_usual` over that of the usual mode."""
    usual, rows = modes[USUAL], []
    for name, mode in modes.items():
        reference = mode.alone or usual.alone
        for (batch, k), runs in mode.rounds.items():
            row: dict[str, Any] = {"mode": name, "batch": batch, "draft_len": k, **medians(runs)}
            pairs = zip(runs, mode.rounds[batch, 0], strict=False)
            row["over_plain"] = median(
                run.tokens_per_s / plain.tokens_per_s for run, plain in pairs
            )
            # `generate` has its prompts' pass in its time.
            what = "all_tokens_per_s" if name == TRANSFORMERS else "tokens_per_s"
            same = [getattr(run, what) for run in usual.rounds.get((batch, k), ())]
            row["over_usual"] = row[what] / median(same) if same else None
            both = list(zip(mode.outputs[batch, k], reference, strict=False))
            row |= {"identical": sum(a == b for a, b in both), "compared": len(both)}
            rows.append(row)
    return rows


def show(modes: dict[str, Mode]) -> None:
    """Print all tables."""
    rows = rows_of(modes)
    for row in rows:
        row["ceiling"] = f"{row['ceiling']:.0f} ({row['tokens_per_s'] / row['ceiling']:.0%})"
    if rows:
        print(
            table(list(rows[0]), [["" if x is None else x for x in row.values()] for row in rows])
        )
    header = ("mode", "state", "GPU memory, GB", "message")
    said = []
    for name, mode in modes.items():
        message, memory_gb = mode.message.replace("|", "\\|"), mode.memory_gb or ""
        said.append((name, mode.state, memory_gb, message))
    print(table(header, said))


def modes_of(args: argparse.Namespace, device: torch.device) -> dict[str, Mode]:
    """What runs, in this order."""
    rows: int = max(*args.batches, GENERATE_BATCH)
    context_len: int = args.prompt_tokens + args.new_tokens
    config = ReplicaConfig(
        target=f"planted:{args.shape}?acceptance={args.acceptance}",
        speculative_config=SpeculativeConfig(
            method="draft_model", model=f"planted:{DRAFTS[args.shape]}"
        ),
        device=str(device),
        dtype=args.dtype,
        block_size=BLOCK_SIZE,
        context_len=context_len,
        # Or prompts would be filled in the first round only.
        prefix_sharing=False,
        calibrate=False,
        num_gpu_blocks_override=rows * (-(-context_len // BLOCK_SIZE) + 1),
        plan_rows=rows,
        plan_draft_len=max(args.draft_lens),
    )
    head = {"speculative_config": {"method": "eagle3", "model": PLANTED_HEAD}}
    changes: dict[str, dict[str, Any]] = {USUAL: {}, TRANSFORMERS: {}, HEAD: head}
    if device.type == "cuda":
        changes[EAGER] = {"graphs": "off"}
    if not args.no_deterministic:
        changes[DETERMINISTIC] = {"deterministic": True}
        changes[DETERMINISTIC_HEAD] = {"deterministic": True, **head}
    given = config.model_dump(exclude_unset=True)
    return {name: Mode(ReplicaConfig(**{**given, **own})) for name, own in changes.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run everything, print the tables; returns the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--quick", type=Path, metavar="FOLDER", help="see quick.py; JSON goes there"
    )
    parser.add_argument("--only", nargs="+", default=[], help="parts of --quick")
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(DRAFTS))
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1 8 16 32 64")
    parser.add_argument("--draft-lens", type=int, nargs="+", help="default: 2 4 6")
    parser.add_argument("--draft-batch-max", type=int, default=64, help="no speculation above it")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--rounds", type=int, help="after one that warms up; default: 2")
    parser.add_argument("--no-deterministic", action="store_true")
    parser.add_argument("--alone", type=int, default=8, help="requests that run alone, too")
    args = parser.parse_args(argv)
    if args.quick is not None:
        device = "cuda" if args.device == "auto" else args.device
        return quick(device, args.quick, args.only)

    device, tiny = resolve_device(args.device), args.shape == "tiny"
    args.prompt_tokens = args.prompt_tokens or (24 if tiny else 256)
    args.new_tokens = args.new_tokens or (16 if tiny else 128)
    args.batches = sorted(args.batches or ([1, 4] if tiny else [1, 8, 16, 32, 64]))
    args.draft_lens = args.draft_lens or ([3] if tiny else [2, 4, 6])
    args.rounds = args.rounds or (1 if tiny else 2)
    args.dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    rates = measure_rates(device, getattr(torch, args.dtype))
    free(device)
    described: dict[str, Any] = {
        "settings": {name: value for name, value in vars(args).items() if name != "json"},
        "threads": torch.get_num_threads(),
        "copy_gb_per_s": rates.bytes_per_s / 1e9,
        "matrix_tflop_per_s": rates.operations_per_s / 1e12,
    }
    print({**machine(), **described}, flush=True)
    modes = modes_of(args, device)
    for name, mode in modes.items():
        if "scale" in described:
            # The same weights, without calibrating again.
            target = f"planted:{args.shape}?scale={described['scale']!r}"
            mode.config = mode.config.model_copy(update={"target": target})
        described = attempt(name, mode, args, rates) | described
        shown = {name: {what: getattr(mode, what) for what in TOLD} for name, mode in modes.items()}
        write_json(args.json, {**described, "modes": shown, "runs": rows_of(modes)})
    show(modes)
    return int(any(mode.state == "failed" for mode in modes.values()))


if __name__ == "__main__":
    sys.exit(main())
