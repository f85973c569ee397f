"""Random worlds without end: `python -m tests.sim --worlds 20000 --seed 1 --processes 2`.

Draws the knobs and the seed of each world from one seed and a number, runs it with all invariants
checked after every event, and compares every request with its reference output. What fails is
printed with the call that replays it; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.sim.sweep import WorldResult, draw, run_world

FAILURES_SHOWN = 5
_PROGRESS_S = 10.0


def main() -> int:
    """Parse the command line, run the worlds, print what came out. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first world")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    print(f"seed {args.seed}: worlds {args.first} to {args.first + args.worlds - 1}", flush=True)

    began_s = said_s = time.monotonic()
    done = 0
    failed: list[int] = []
    ends: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for result in _run(range(args.first, args.first + args.worlds), args.seed, args.processes):
        done += 1
        ends += result.ends
        sums += result.sums
        if result.failure:
            failed.append(result.number)
            if len(failed) <= FAILURES_SHOWN:
                _print_failure(result, args.seed)
        if time.monotonic() - said_s > _PROGRESS_S:
            said_s = time.monotonic()
            rate = done / (said_s - began_s)
            print(f"{done} worlds, {len(failed)} failed, {rate:.0f} worlds/s", flush=True)
    counts = ", ".join(f"{ends[name]} {name}" for name in sorted(ends))
    print(
        f"{done} worlds in {time.monotonic() - began_s:.0f} s, {ends.total()} requests ({counts}); "
        + ", ".join(f"{count} {name}" for name, count in sums.items())
    )
    if failed:
        print(f"FAILED: {len(failed)} worlds: {failed[:50]}")
    return 1 if failed else 0


def _run(numbers: range, seed: int, processes: int) -> Iterator[WorldResult]:
    """Worlds in their order; a process that dies is an error, not a wait."""
    run = partial(run_world, seed=seed)
    if processes == 1:
        yield from map(run, numbers)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(run, numbers, chunksize=16)


def _print_failure(result: WorldResult, seed: int) -> None:
    world_seed, knobs = draw(seed, result.number)
    print(
        f"world {result.number} failed:\n{result.failure}"
        f"replay: python -m tests.sim --seed {seed} --first {result.number} --worlds 1\n"
        f"    or: build({world_seed}, {knobs})",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
