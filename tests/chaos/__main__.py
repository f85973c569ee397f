"""`python -m tests.chaos --seed 1 --minutes 2`: kills processes under load, checks every answer.

A real cluster serves a mixed load over gRPC and, where `make test-clients-light` has installed the
`openai` package, over HTTP (unary calls and streams, greedy and sampled, stop strings, cancels,
deadlines, priorities). Meanwhile processes of all kinds are killed, and settings changed, at times
drawn from the seed. Every answer is compared with that of an undisturbed run. The exit status is 1
if any was lost, doubled or wrong, or if the pool still holds a sequence or a KV block. `--kinds`
without a kind kills nothing: then the memory of each process tells whether anything grows (`make
soak`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from random import Random

from benchmarks.shared.report import machine, table
from tests.chaos.kills import Kind
from tests.chaos.phases import is_clean, run_all, sentences


def main() -> int:
    """Parse the command line, run, print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="drawn if not given")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument(
        "--real-share", type=float, default=0.5, help="of the time, with a real pair; else fakes"
    )
    parser.add_argument(
        "--kinds", nargs="*", choices=[kind.value for kind in Kind], default=[*Kind]
    )
    parser.add_argument("--shards", type=int, default=1, help="pools that share the fakes")
    parser.add_argument(
        "--slower", type=float, default=1.0, help="times pauses and patience: a busy machine"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    seed = Random().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    kinds = [Kind(kind) for kind in args.kinds]
    phases = run_all(
        seed,
        args.minutes * 60,
        args.real_share,
        kinds,
        lambda line: print(line, flush=True),
        args.shards,
        args.slower,
    )
    for figures in phases:
        print(f"\n{figures['phase']}, {figures['seconds']:.0f} s\n{sentences(figures)}")
        if figures["memory"]:
            rows = [list(process.values()) for process in figures["memory"]]
            print(table(list(figures["memory"][0]), rows))
    clean = all(map(is_clean, phases))
    print(f"\nseed {seed}: {'nothing lost, doubled, wrong or left over' if clean else 'FAILED'}")
    if args.json is not None:
        written = {"machine": machine(), "seed": seed, "phases": phases}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(written, indent=2) + "\n")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
