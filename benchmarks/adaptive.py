"""What choosing the draft length by cost is worth, in virtual time: the same on any machine.

    python -m benchmarks.adaptive [--json FILE]

The real scheduler over one replica whose steps take given times (those of the demo pair on two
cores, rounded) and whose draft is right with a given probability per request. For every mix of
requests: tokens/s of fixed draft lengths and of the chosen one, with the replica's trial steps and
without. Then the same where a verification takes whole tiles of tokens, so that its time rises in
steps and not in a straight line. Needs neither Ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from random import Random
from typing import NamedTuple

from benchmarks.shared.command_line import parser_of
from benchmarks.shared.report import table, write_json
from cluster.local_engine import REPLICA_ID, LocalEngine
from scheduler.config import SchedulerConfig
from scheduler.messages import (
    Batch,
    BatchKind,
    Release,
    ReplicaSpec,
    Request,
    RowResult,
    StepResult,
    StepRow,
    StepTimes,
    TriedBatch,
)
from scheduler.simulation import SimulatedReplica


class LinearCost(NamedTuple):
    """Seconds: once, per token and per KV position."""

    fixed_s: float
    token_s: float = 0.0
    kv_s: float = 0.0

    def __call__(self, tokens: float, kv: float) -> float:
        return self.fixed_s + self.token_s * tokens + self.kv_s * kv


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
"""Acceptance of the requests, in turns."""
PROMPT = (16, 256)
NEW_TOKENS = 128
TILES = (16, 32, 64)
"""Tokens of a tile, where hardware computes whole tiles."""
TILED_VERIFY = LinearCost(11e-3, 1e-3, 2e-7)
"""Bound by operations, or tiles would hardly matter."""
TILED_ACCEPTANCES = (0.6, 0.75, 0.87)
TILED_FIXED = tuple(range(9))
"""All of them, for the best one depends on where a tile ends."""


@dataclass(frozen=True)
class Compared:
    """Speeds in tokens/s of virtual time, of fixed draft lengths and of the chosen one."""

    mix: str
    tile: int
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


class VirtualReplica:
    """Implements `Runner` of the local engine; time passes only while it runs a batch."""

    def __init__(self, acceptance: Sequence[float], timed: bool, tile: int = 1) -> None:
        """`tile`: tokens that a verification takes together; 1: as many as there are."""
        self.now_s = 0.0
        self._tile = tile
        self.spec = ReplicaSpec(
            kv_blocks=100_000,
            block_size=16,
            context_len=1 << 16,
            vocab_size=2,
            trials=tuple(_trials(tile)) if timed else (),
        )
        self._replica = SimulatedReplica(
            REPLICA_ID,
            self.spec,
            self._times,
            lambda request_id: acceptance[int(request_id) % len(acceptance)],
            Random(0),
        )

    def clock(self) -> float:
        return self.now_s

    def step(self, batch: Batch) -> StepResult:
        self._replica.receive(batch)
        self._replica.begin(batch)
        while self._replica.advance():
            pass
        result = self._replica.end()
        self.now_s += result.times.total_s
        return result

    def release(self, sequence_ids: Iterable[str]) -> None:
        self._replica.release(Release(REPLICA_ID, tuple(sequence_ids)))

    def _times(self, batch: Batch) -> StepTimes:
        if batch.kind is BatchKind.PREFILL:
            spent_s = PREFILL(batch.prefill_tokens, 0)
            return StepTimes(prefill_s=spent_s, total_s=spent_s)
        rows, longest = len(batch.rows), batch.rows[-1].length
        draft_s, verify_s = _parts(rows, batch.draft_len, longest, self._tile)
        return StepTimes(draft_s=draft_s, verify_s=verify_s, total_s=draft_s + verify_s + REST_S)


def _parts(rows: int, k: int, longest: int, tile: int) -> tuple[float, float]:
    """Seconds of all draft passes and of the verification of a step."""
    positions, tokens = rows * (longest + k), rows * (k + 1)
    verify = VERIFY if tile == 1 else TILED_VERIFY
    return k * DRAFT(rows, positions), verify(tile * -(-tokens // tile), positions)


def _trials(tile: int) -> Iterator[TriedBatch]:
    """As `replicas.calibration` makes them."""
    for rows, k, _ in product((1, 8), (0, 4), range(3)):
        draft_s, verify_s = _parts(rows, k, 64, tile)
        steps = tuple(StepRow(str(row), 64, k, 0) for row in range(rows))
        batch = Batch(0, REPLICA_ID, BatchKind.SPECULATE, rows=steps, draft_len=k)
        times = StepTimes(0.0, draft_s, verify_s, draft_s + verify_s + REST_S)
        done = tuple(RowResult(row.sequence_id, (1,), 1, k, asked_tokens=k) for row in steps)
        yield batch, StepResult(0, REPLICA_ID, done, 1, times)


def measure(
    mix: str, acceptance: Sequence[float], rows: int, tile: int = 1, fixed: Sequence[int] = FIXED
) -> Compared:
    """All ways over the same requests: 16 of them at batch 1, else 64, all there at the start."""

    def speed(draft_len: int | None, timed: bool = True) -> float:
        replica = VirtualReplica(acceptance, timed, tile)
        config = SchedulerConfig(rows_max=rows, draft_len=draft_len)
        engine, draw = LocalEngine(replica, config, clock=replica.clock), Random(1)
        outputs = engine.generate(
            [
                Request(str(i), (1,) * draw.randint(*PROMPT), NEW_TOKENS)
                for i in range(16 if rows == 1 else 64)
            ]
        )
        return sum(len(output.tokens) for output in outputs) / replica.now_s

    by_fixed = {k: speed(k) for k in fixed}
    return Compared(mix, tile, rows, by_fixed, speed(None), speed(None, timed=False))


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    args = parser.parse_args()
    found = [measure(mix, MIXES[mix], rows) for mix in MIXES for rows in args.rows]
    tiled = [
        measure(str(acceptance), (acceptance,), rows, tile, TILED_FIXED)
        for tile in TILES
        for acceptance in TILED_ACCEPTANCES
        for rows in args.rows
        if rows > 1
    ]
    header = (
        *("acceptance", "tile", "batch", "best fixed k", "tokens/s", "chosen k"),
        *("over best fixed", "over k = 0", "without trials"),
    )
    print(
        table(
            header,
            [
                (
                    *(one.mix, one.tile, one.rows, one.best_fixed, one.fixed[one.best_fixed]),
                    *(one.chosen, one.over_best_fixed, one.chosen / one.fixed[0]),
                    one.chosen_without_trials / one.fixed[one.best_fixed],
                )
                for one in (*found, *tiled)
            ],
        )
    )
    figures = {
        "mixes": [asdict(one) for one in found],
        "tiled": [asdict(one) for one in tiled],
    }
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
