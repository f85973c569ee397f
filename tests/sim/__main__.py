"""Random worlds without end: `python -m tests.sim --worlds 20000 --seed 1 --processes 2`.

Draws the knobs and the seed of each world from one seed and a number, runs it with all invariants
checked after every event, and compares every request with the perfect world. What fails is printed
with the call that replays it; the exit status is 1 then.
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

from scheduler.messages import FinishReason
from tests.sim.sweep import Told, draw, run_world

FAILURES_SHOWN = 5
_PROGRESS_S = 10.0
_CHUNK = 16


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
    failed: list[Told] = []
    ends: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    numbers = range(args.first, args.first + args.worlds)
    for told in _run(numbers, args.seed, args.processes):
        done += 1
        ends.update(told.ends)
        for name in ("recovered", "preempted", "moved", "killed"):
            sums[name] += getattr(told, name)
        if told.failure:
            failed.append(told)
            if len(failed) <= FAILURES_SHOWN:
                _print_failure(told, args.seed)
        if time.monotonic() - said_s > _PROGRESS_S:
            said_s = time.monotonic()
            rate = done / (said_s - began_s)
            print(f"{done} worlds, {len(failed)} failed, {rate:.0f} worlds/s", flush=True)
    seconds = time.monotonic() - began_s
    known = {reason.value for reason in FinishReason} | {"refused"}
    assert set(ends) <= known
    print(
        f"{done} worlds in {seconds:.0f} s, {sum(ends.values())} requests "
        f"({', '.join(f'{ends[name]} {name}' for name in sorted(ends))}); "
        f"{sums['recovered']} times a place was lost, {sums['preempted']} for want of blocks, "
        f"{sums['moved']} to balance; {sums['killed']} replicas killed by deadly requests"
    )
    if failed:
        print(f"FAILED: {len(failed)} worlds: {sorted(told.number for told in failed)[:50]}")
    return 1 if failed else 0


def _run(numbers: range, seed: int, processes: int) -> Iterator[Told]:
    """Worlds in their order; a process that dies is an error, not a wait."""
    run = partial(run_world, seed=seed)
    if processes == 1:
        yield from map(run, numbers)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(run, numbers, chunksize=_CHUNK)


def _print_failure(told: Told, seed: int) -> None:
    world_seed, knobs = draw(seed, told.number)
    print(
        f"world {told.number} failed:\n{told.failure}"
        f"replay: python -m tests.sim --seed {seed} --first {told.number} --worlds 1\n"
        f"    or: build({world_seed}, {knobs})",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
