"""A load that rises from nothing and falls to nothing, against a cluster that follows it.

    python -m benchmarks.autoscaling [--json FILE] [--plot FILE]

Starts Ray, Serve, the pool and up to four synthetic replicas (`benchmarks.shared.synthetic`) on
this machine. Requests arrive as a seeded Poisson process whose rate follows a given profile; every
answer is compared with the reference output. Written: offered load, replicas, waiting, latency by
time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
from ray import serve

from benchmarks.shared.command_line import parser_of
from benchmarks.shared.report import percentiles, table, write_json
from benchmarks.shared.synthetic import Speed, synthetic_loader, synthetic_spec
from cluster import app, serve_view
from cluster.bench.plots import Plot, line, to_svg
from cluster.client import NO_RETRY, AsyncClient
from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from cluster.run import ClusterRun
from protos import lockstep_pb2 as pb
from scheduler.messages import Request
from scheduler.simulation import poisson, reference_output

PROFILE = ((0, 0.0), (5, 0.02), (80, 1.0), (130, 1.0), (200, 0.02), (230, 0.0))
"""(seconds, share of the peak rate); straight lines between."""
END_S = 300.0
"""The last replica must be gone by then."""
PERCENTILES = (50, 90, 99)
SLOT_S = 5
"""Requests that arrive in the same slot are one point of the picture."""
SPEED = Speed(step_s=0.04, prefill_s=0.04, start_s=3.0, acceptance=0.7)
DRAFT_LEN = 4
AUTOSCALING = {
    "min_replicas": 0,
    "max_replicas": 4,
    "drain_s": 5.0,
    "up_delay_s": 2.0,
    "down_delay_s": 15.0,
    "idle_s": 20.0,
    "tokens_per_s": 500.0,
}
SAMPLE = ("s", "asked_per_s", "committed_per_s", "wanted", "serving", "waiting", "outstanding")
LATENCY = ("s", "first_p50", "first_p95", "total_p50", "total_p95")
"""Columns of what is written over time, as lines of comma-separated values."""


Load = Sequence[tuple[float, Request]]
"""Requests and when each arrives."""


@dataclass(frozen=True)
class Answer:
    """How one request went; times in seconds of the run."""

    at_s: float
    tokens: int
    first_token_s: float
    """From the server's first sight of it to its first token: the wait and the prefill."""
    total_s: float
    recovered: int
    right: bool


@dataclass(frozen=True)
class Sample:
    at_s: float
    committed_per_s: float
    wanted: int
    serving: int
    waiting: int
    outstanding: int


def share_at(at_s: float) -> float:
    for (from_s, start), (to_s, end) in pairwise(PROFILE):
        if at_s < to_s:
            return start + (end - start) * (at_s - from_s) / (to_s - from_s)
    return 0.0


def arrivals(rng: Random, peak_per_s: float, vocab_size: int) -> Load:
    """A Poisson process at the peak rate, thinned to the profile."""
    made: list[tuple[float, Request]] = []
    for at_s in poisson(peak_per_s, rng):
        if at_s >= PROFILE[-1][0]:
            break
        if rng.random() < share_at(at_s):
            prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.choice((16, 64, 256))))
            made.append((at_s, Request("", prompt, rng.choice((32, 96, 192)))))
    return made


class Run:
    """The load and the looks at the cluster, from `start_s` on."""

    def __init__(self, client: AsyncClient, vocab_size: int) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._start_s = time.monotonic()
        self._over = False
        self.answers: list[Answer] = []
        self.failures: list[str] = []
        self.samples: list[Sample] = []

    def now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def play(self, load: Load) -> None:
        """Returns when every request has ended and the last replica is gone."""
        self._start_s = time.monotonic()
        watching = asyncio.create_task(self._watch())
        asked = []
        for at_s, request in load:
            await asyncio.sleep(max(0.0, at_s - self.now_s()))
            asked.append(asyncio.create_task(self._ask(request)))
        await asyncio.gather(*asked)
        self._over = True
        await watching

    async def _ask(self, request: Request) -> None:
        at_s = self.now_s()
        message = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=request.prompt),
            max_new_tokens=request.max_new_tokens,
            ignore_eos=True,
        )
        try:
            response = await self._client.generate(message)
        except grpc.RpcError as error:
            self.failures.append(f"{error.code().name}: {error.details()}")
            return
        expected, _ = reference_output(request, self._vocab_size)
        answer = Answer(
            at_s,
            len(response.token_ids),
            response.end.first_token_s,
            self.now_s() - at_s,
            response.end.recovered,
            tuple(response.token_ids) == expected,
        )
        self.answers.append(answer)

    async def _watch(self) -> None:
        while self.now_s() < END_S:
            status = await self._client.status()
            states = await asyncio.to_thread(_replica_states)
            sample = Sample(
                at_s=self.now_s(),
                committed_per_s=status.tokens_per_s,
                wanted=sum(states.get(state, 0) for state in ("STARTING", "RUNNING")),
                serving=sum(not replica.draining for replica in status.replicas),
                waiting=status.waiting,
                outstanding=status.outstanding_tokens,
            )
            self.samples.append(sample)
            if len(self.samples) % 20 == 0:
                print(sample, flush=True)
            if self._over and not sample.serving and not sample.wanted:
                return
            await asyncio.sleep(max(0.0, 1.0 - self.now_s() % 1.0))


def _replica_states() -> dict[str, int]:
    deployments = serve.status().applications[serve_view.APP_NAME].deployments
    return {str(state): count for state, count in deployments["replica"].replica_states.items()}


def offered(load: Load, second: int, window_s: int = 5) -> float:
    """Tokens per second that were asked for in the seconds around this one."""
    low_s, high_s = second - window_s / 2, second + window_s / 2
    return sum(call.max_new_tokens for at_s, call in load if low_s <= at_s < high_s) / window_s


def one_replica(run: Run) -> float:
    """The most that one replica alone committed per second, prefills on the way; 0 if none was seen
    alone at work."""
    return max((s.committed_per_s for s in run.samples if s.serving == 1), default=0.0)


def figures(run: Run, load: Load, full: float) -> dict[str, Any]:
    """What the JSON holds; `full` is what full batches of one replica would commit per second."""
    phases = {"cold start": (0, 20), "rise": (20, 80), "plateau": (80, 130), "fall": (130, 300)}
    by_phase = {}
    for name, (from_s, to_s) in phases.items():
        some = [answer for answer in run.answers if from_s <= answer.at_s < to_s]
        by_phase[name] = {
            "requests": len(some),
            "first_token_s": percentiles((record.first_token_s for record in some), PERCENTILES),
            "total_s": percentiles((record.total_s for record in some), PERCENTILES),
        }
    replica_s = sum(a.serving * (b.at_s - a.at_s) for a, b in pairwise(run.samples))
    most = max(sample.serving for sample in run.samples)
    tokens = sum(answer.tokens for answer in run.answers)
    first = min(run.answers, key=lambda answer: answer.at_s)
    wanted = [sample.wanted for sample in run.samples]
    last, alone = run.samples[-1], one_replica(run)
    return {
        "requests": len(load),
        "failed": len(run.failures),
        "wrong": sum(not answer.right for answer in run.answers),
        "moved": sum(answer.recovered > 0 for answer in run.answers),
        "tokens": tokens,
        "one_replica_tokens_per_s": round(alone) if alone else None,
        "one_replica_without_prefills_tokens_per_s": round(full),
        "cold_start_s": round(first.first_token_s, 2),
        "replicas_most": most,
        "changes_of_the_wanted_number": sum(a != b for a, b in pairwise(wanted)),
        "replica_s": round(replica_s),
        "replica_s_of_a_fixed_number": round(most * (last.at_s - run.samples[0].at_s)),
        "used_share": round(tokens / (replica_s * alone), 3) if replica_s * alone else None,
        "none_left_at_s": None if last.serving or last.wanted else round(last.at_s, 1),
        "phases": by_phase,
        "samples": [",".join(SAMPLE)]
        + [
            f"{s.at_s:.1f},{offered(load, round(s.at_s)):.0f},{s.committed_per_s:.0f},"
            f"{s.wanted},{s.serving},{s.waiting},{s.outstanding}"
            for s in run.samples
        ],
        "latency": [",".join(LATENCY), *latency(run.answers)],
    }


def latency(answers: Sequence[Answer]) -> list[str]:
    """One line per slot of arrival: the columns of LATENCY."""
    slots: dict[int, list[Answer]] = {}
    for answer in answers:
        slots.setdefault(int(answer.at_s // SLOT_S) * SLOT_S, []).append(answer)
    lines = []
    for at_s, some in sorted(slots.items()):
        firsts = [answer.first_token_s for answer in some]
        totals = [answer.total_s for answer in some]
        picked = [np.percentile(times, n) for times in (firsts, totals) for n in (50, 95)]
        lines.append(f"{at_s}," + ",".join(f"{value:.3f}" for value in picked))
    return lines


def columns(lines: Sequence[str]) -> dict[str, list[float]]:
    """The values by the names in the first line."""
    names = lines[0].split(",")
    rows = [[float(value) for value in line.split(",")] for line in lines[1:]]
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def picture(found: dict[str, Any]) -> str:
    """What the JSON holds over time, as SVG text. Raises ImportError without matplotlib."""
    looks, times = columns(found["samples"]), columns(found["latency"])

    def over_time(of: dict[str, list[float]], name: str, title: str, unit: str) -> Plot:
        return line(list(zip(of["s"], of[name], strict=True)), title, "s", unit)

    return to_svg(
        [
            [
                over_time(looks, "asked_per_s", "Asked for", "tokens/s"),
                over_time(looks, "committed_per_s", "Committed", "tokens/s"),
            ],
            [
                over_time(looks, "wanted", "Replicas wanted", "replicas"),
                over_time(looks, "serving", "Replicas that serve", "replicas"),
            ],
            [
                over_time(times, "first_p95", "To the first token, 95 % by arrival", "s"),
                over_time(times, "total_p95", "Whole answer, 95 % by arrival", "s"),
            ],
        ]
    )


async def measure(config: ClusterConfig, load: Load, vocab_size: int) -> Run:
    async with AsyncClient(f"localhost:{config.server.grpc_port}", retry=NO_RETRY) as client:
        run = Run(client, vocab_size)
        await run.play(load)
        return run


def main() -> None:
    """Parse the command line, start a cluster, play the load, print and write, stop the cluster."""
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peak", type=float, default=14.0, help="requests/s at the peak")
    parser.add_argument("--grpc-port", type=int, default=9230)
    parser.add_argument("--plot", type=Path, help="write the picture here, as SVG")
    args = parser.parse_args()

    config = from_args(
        {
            "autoscaling": AUTOSCALING,
            "scheduler.draft_len": DRAFT_LEN,
            "server.grpc_port": args.grpc_port,
            "server.http_port": args.grpc_port + 1,
        }
    )
    spec = synthetic_spec(config.replica)
    load = arrivals(Random(args.seed), args.peak, spec.vocab_size)
    full = SPEED.tokens_per_s(config.scheduler.rows_max, DRAFT_LEN)
    cluster = ClusterRun(config)
    try:
        cluster.start(app.build_app(config, load=synthetic_loader(spec, SPEED)), quiet=True)
        run = asyncio.run(measure(config, load, spec.vocab_size))
    finally:
        cluster.stop()
    found = figures(run, load, full)
    rows = [
        [name, phase["requests"], *phase["first_token_s"].values(), *phase["total_s"].values()]
        for name, phase in found["phases"].items()
    ]
    print(table(("phase", "requests", *([f"p{n}" for n in PERCENTILES] * 2)), rows))
    print({name: value for name, value in found.items() if not isinstance(value, dict | list)})
    print(*sorted(set(run.failures)), sep="\n")
    if found["none_left_at_s"] is None:
        print(f"Replicas are left after {END_S:.0f} s.")
    settings = {"seed": args.seed, "peak_per_s": args.peak, "speed": vars(SPEED)}
    write_json(args.json, {**settings, "autoscaling": AUTOSCALING, **found})
    if args.plot:
        args.plot.write_text(picture(found), encoding="utf-8")


if __name__ == "__main__":
    main()
