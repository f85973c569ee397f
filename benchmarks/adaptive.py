"""What choosing the draft length by cost is worth, in virtual time: the same on any machine.

    python -m benchmarks.adaptive [--json FILE]

The real scheduler over one replica whose steps take given times (those of the demo pair on two
cores, rounded) and whose draft is right with a given probability per request. For every mix of
requests: tokens/s of fixed draft lengths and of the chosen one, with the replica's trial steps and
without. Needs neither Ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from random import Random

from benchmarks.shared.command_line import parser_of
from benchmarks.shared.linear import LinearCost, LinearTimes
from benchmarks.shared.report import table, write_json
from scheduler.config import SchedulerConfig
from scheduler.messages import (
    Batch,
    BatchKind,
    ReplicaSpec,
    RowResult,
    StepResult,
    StepRow,
    TriedBatch,
)
from scheduler.simulation import Experiment, Setup, Times, WorkloadRequest

DRAFT = LinearCost(1.5e-3, 6e-5, 3e-8)
"""One pass, by rows and KV positions."""
VERIFY = LinearCost(11e-3, 3.5e-4, 2e-7)
PREFILL = LinearCost(5e-3, 2.5e-4)
REST_S = 1e-4
FIXED = (0, 1, 2, 3, 4, 6, 8)
MIXES: dict[str, tuple[float, ...]] = {
    "never right": (0.0,),
    "0.3": (0.3,),
    "0.6": (0.6,),
    "0.87": (0.87,),
    "half 0.92, half 0.2": (0.92, 0.2),
}
"""Acceptance rates of the requests, in turns."""
PROMPT = (16, 256)
NEW_TOKENS = 128
TIMES = LinearTimes(DRAFT, VERIFY, PREFILL, REST_S)


@dataclass(frozen=True)
class Compared:
    """Speeds in tokens/s of virtual time, of fixed draft lengths and of the chosen one."""

    mix: str
    rows: int
    fixed: dict[int, float]
    chosen: float
    chosen_without_trials: float

    @property
    def best_fixed(self) -> int:
        return max(self.fixed, key=self.fixed.__getitem__)

    @property
    def over_best_fixed(self) -> float:
        return self.chosen / self.fixed[self.best_fixed]


def trials(times: Times) -> Iterator[TriedBatch]:
    """As `replicas.calibration` makes them, of a replica with these times."""
    for rows, k, _ in product((1, 8), (0, 4), range(3)):
        steps = tuple(StepRow(str(row), 64, k, 0) for row in range(rows))
        batch = Batch(0, "r0", BatchKind.SPECULATE, rows=steps, draft_len=k)
        done = tuple(RowResult(row.sequence_id, (1,), 1, k, asked_tokens=k) for row in steps)
        yield batch, StepResult(0, "r0", done, 1, times(batch))


def measure(
    mix: str, acceptance: Sequence[float], rows: int, fixed: Sequence[int] = FIXED
) -> Compared:
    """All ways over the same requests: 16 of them at batch 1, else 64, all there at the start."""
    draw = Random(1)
    requests = [
        WorkloadRequest(0.0, draw.randint(*PROMPT), NEW_TOKENS, acceptance[i % len(acceptance)])
        for i in range(16 if rows == 1 else 64)
    ]

    def speed(draft_len: int | None, timed: bool = True) -> float:
        spec = ReplicaSpec(100_000, 16, 1 << 16, 2, trials=tuple(trials(TIMES)) if timed else ())
        config = SchedulerConfig(rows_max=rows, draft_len=draft_len)
        setup = Setup(1, spec, TIMES, config, message_s=(0.0, 0.0))
        figures = Experiment(setup, requests, Random(0)).run()
        return figures.tokens / figures.elapsed_s

    by_fixed = {k: speed(k) for k in fixed}
    return Compared(mix, rows, by_fixed, speed(None), speed(None, timed=False))


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    args = parser.parse_args()
    found = [measure(mix, MIXES[mix], rows) for mix in MIXES for rows in args.rows]
    header = (
        *("acceptance", "batch", "best fixed k", "tokens/s", "chosen k"),
        *("over best fixed", "over k = 0", "without trials"),
    )
    print(
        table(
            header,
            [
                (
                    *(result.mix, result.rows, result.best_fixed, result.fixed[result.best_fixed]),
                    *(result.chosen, result.over_best_fixed, result.chosen / result.fixed[0]),
                    result.chosen_without_trials / result.fixed[result.best_fixed],
                )
                for result in found
            ],
        )
    )
    write_json(args.json, {"mixes": [asdict(result) for result in found]})


if __name__ == "__main__":
    main()
