"""What a drafter on a GPU of its own is worth, in virtual time: the same on any machine.

    python -m benchmarks.overlap [--json FILE]

The real scheduler over one replica, whose target lies on four GPUs. Its draft model runs on one of
them, one after the other with the target; or on a fifth one, where a batch is drafted while another
is checked. Times are those of a roofline, with two sums over all GPUs in each layer of the target.
Twice as many requests as a batch has rows, so that two full batches take turns; and as many, which
one batch could hold. Needs neither Ray nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random

from benchmarks.adaptive import trials
from benchmarks.shared.command_line import parser_of
from benchmarks.shared.report import table, write_json
from scheduler.config import SchedulerConfig
from scheduler.messages import ReplicaSpec
from scheduler.simulation import (
    DEVICES,
    Decoder,
    Experiment,
    Roofline,
    Setup,
    WorkloadRequest,
    joined,
)

GPUS = 4
_QWEN3_06B = Decoder(28, 1024, 3072, heads=16, kv_heads=8, head_dim=128, vocab=151936, tied=True)
PAIRS = {
    "8B / 0.6B": (
        Decoder(36, 4096, 12288, heads=32, kv_heads=8, head_dim=128, vocab=151936),
        _QWEN3_06B,
    ),
    "32B / 0.6B": (
        Decoder(64, 5120, 25600, heads=64, kv_heads=8, head_dim=128, vocab=151936),
        _QWEN3_06B,
    ),
    "70B / 8B": (
        Decoder(80, 8192, 28672, heads=64, kv_heads=8, head_dim=128, vocab=128256),
        Decoder(32, 4096, 14336, heads=32, kv_heads=8, head_dim=128, vocab=128256),
    ),
}
"""Qwen3 and Llama 3."""
ACCEPTANCE = 0.8
PROMPT = (100, 300)
NEW_TOKENS = 256
LOADS = ((16, 32), (32, 32))
"""Rows of a batch, requests in flight."""
DRAFT_LENS = (5, None)
"""None: chosen."""


@dataclass(frozen=True)
class Compared:
    """Tokens/s of virtual time, and draft tokens per row and step."""

    pair: str
    rows: int
    in_flight: int
    draft_len: int | None
    plain: float
    plain_drafted: float
    overlapped: float
    overlapped_drafted: float

    @property
    def gain(self) -> float:
        return self.overlapped / self.plain


def measure(
    pair: str, device: str, rows: int, in_flight: int, draft_len: int | None, rounds: int = 4
) -> Compared:
    """Both ways over the same requests: `rounds` as many as are in flight."""
    gpu, (target, draft) = DEVICES[device], PAIRS[pair]
    times = Roofline(joined(gpu, GPUS), target, draft, gpu).times
    draw = Random(1)
    requests = [
        WorkloadRequest(0.0, draw.randint(*PROMPT), NEW_TOKENS, ACCEPTANCE)
        for _ in range(rounds * in_flight)
    ]
    config = SchedulerConfig(rows_max=rows, draft_len=draft_len)

    def run(overlaps: bool) -> tuple[float, float]:
        tried = tuple(trials(times))
        spec = ReplicaSpec(100_000, 16, 8192, 2, overlaps=overlaps, trials=tried)
        figures = Experiment(
            Setup(1, spec, times, config, in_flight=in_flight), requests, Random(0)
        ).run()
        return figures.tokens_per_s(), figures.sums.draft_tokens / figures.sums.row_steps

    return Compared(pair, rows, in_flight, draft_len, *run(False), *run(True))


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=sorted(DEVICES), default="h100")
    parser.add_argument("--pairs", choices=list(PAIRS), nargs="+", default=list(PAIRS))
    args = parser.parse_args()
    found = [
        measure(pair, args.device, *load, draft_len)
        for pair in args.pairs
        for load in LOADS
        for draft_len in DRAFT_LENS
    ]
    print(table(_HEADER, [_cells(result) for result in found]))
    write_json(args.json, {"device": args.device, "compared": [asdict(each) for each in found]})


_HEADER = (
    *("pair", "rows of a batch", "in flight", "k", "tokens/s, one after the other", "drafted"),
    *("overlapped", "drafted", "over"),
)


def _cells(result: Compared) -> Sequence[object]:
    k = "chosen" if result.draft_len is None else result.draft_len
    return (
        *(result.pair, result.rows, result.in_flight, k, result.plain, result.plain_drafted),
        *(result.overlapped, result.overlapped_drafted, result.gain),
    )


if __name__ == "__main__":
    main()
