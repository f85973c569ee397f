"""A load that people know, on a cluster that follows it from no replica to four and back.

    make loadtest        or  python -m benchmarks.loadtest [--json FILE] [--plot FILE]

Starts a Serve application of real replicas (the tiny pair) under autoscaling, and plays a ramp, a
burst, nothing and a longer burst: one half by Locust over OpenAI's API, one half by our own client
over gRPC, neither of which ever asks twice. Then the second burst once more on as many replicas as
served its steady half, fixed; and the same profile on 256 simulated replicas. The exit status is 1
unless nothing was lost, the first answer came within the load of a model and three seconds, the
steady half was near that of the fixed cluster, no replica was started and stopped within a phase,
and none is left.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np

from benchmarks.loadtest.load_profile import (
    AUTOSCALING,
    END_S,
    LOAD_S,
    NEW_TOKENS,
    PHASES,
    PROMPT,
    SECOND_BURST,
    STEADY,
    share_at,
)
from benchmarks.loadtest.simulated import REPLICAS, simulate
from benchmarks.shared.command_line import parser_of
from benchmarks.shared.report import table, write_json
from benchmarks.shared.synthetic import synthetic_spec
from cluster import serve_view
from cluster.bench.plots import Plot, line, to_svg
from cluster.client import NO_RETRY, AsyncClient
from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from cluster.run import ClusterRun
from protos import lockstep_pb2 as pb
from scheduler.simulation import poisson

LOCUST = Path(__file__).parents[2] / ".venv-load" / "bin" / "locust"
FOLDER = Path(__file__).parent
ROWS = 2
"""Of a batch; so few that the load takes all four replicas."""
COLD_S_MAX = 3.0
"""What the first answer may take beside the load of a model."""
STEADY_MOST = 1.3
Call = dict[str, Any]
Sample = dict[str, float]


async def ask(client: AsyncClient, start_s: float, calls: list[Call]) -> None:
    """A stream over gRPC."""
    begun_s, first_s, error = time.time(), 0.0, ""
    message = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    try:
        async for _ in client.stream(message, timeout_s=120.0):
            first_s = first_s or time.time()
    except grpc.RpcError as raised:
        error = f"{raised.code().name}: {raised.details()}"
    call = {"at": begun_s - start_s, "first": first_s - begun_s, "total": time.time() - begun_s}
    calls.append({**call, "error": error})


def replica_states() -> dict[str, int]:
    found = serve_view.application()
    assert found is not None
    return dict(found.deployments[serve_view.REPLICA].replica_states)


async def watch(client: AsyncClient, start_s: float, samples: list[Sample]) -> None:
    """Twice a second, for as long as it is not cancelled."""
    while True:
        status, states = await asyncio.gather(
            client.status(), asyncio.to_thread(replica_states), return_exceptions=True
        )
        if not isinstance(status, BaseException) and not isinstance(states, BaseException):
            wanted = sum(states.get(state, 0) for state in ("STARTING", "RUNNING"))
            serving = sum(not replica.draining for replica in status.replicas)
            sample = {"at": time.time() - start_s, "wanted": wanted, "serving": serving}
            sample |= {"waiting": status.waiting, "tokens_per_s": status.tokens_per_s}
            samples.append(sample)
        await asyncio.sleep(0.5)


async def play(
    config: ClusterConfig, peak: float, from_s: float, to_s: float
) -> tuple[list[Call], list[Call], list[Sample]]:
    """The part of the profile between these times: Locust's calls, those over gRPC, and what was
    seen of the cluster; until the profile's end also after the load."""
    start_s = time.time() + 3.0 - from_s
    ours: list[Call] = []
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "calls")
        environment = os.environ | {
            "LOADTEST_OUT": str(out),
            "LOADTEST_START": str(start_s),
            "LOADTEST_PEAK": str(peak / 2),
            "LOADTEST_MODEL": config.model_name,
        }
        environment.pop("PYTHONPATH", None)
        host = f"http://127.0.0.1:{config.server.http_port}"
        command = [LOCUST, "--headless", "--only-summary", "-f", FOLDER / "locustfile.py"]
        command += ["--host", host, "--stop-timeout", "60"]
        with subprocess.Popen(list(map(str, command)), env=environment) as locust:
            async with AsyncClient(
                f"localhost:{config.server.grpc_port}", retry=NO_RETRY
            ) as client:
                watching = asyncio.create_task(watch(client, start_s, samples))
                asked = []
                for at_s in poisson(peak / 2, Random(1)):
                    if at_s > min(to_s, LOAD_S):
                        break
                    if at_s < from_s or Random(at_s).random() >= share_at(at_s):
                        continue
                    await asyncio.sleep(max(0.0, start_s + at_s - time.time()))
                    asked.append(asyncio.create_task(ask(client, start_s, ours)))
                await asyncio.gather(*asked)
                while to_s >= LOAD_S and time.time() - start_s < END_S:
                    if samples and time.time() - start_s > LOAD_S + 5 and not samples[-1]["wanted"]:
                        break
                    await asyncio.sleep(0.5)
                watching.cancel()
            if to_s < LOAD_S:
                locust.terminate()
            await asyncio.to_thread(locust.wait, 90)
        theirs = [json.loads(text) for text in out.read_text().splitlines()]
    return theirs, ours, samples


def settings(fixed: int | None, port: int) -> ClusterConfig:
    number = {"replicas": fixed} if fixed else {"autoscaling": AUTOSCALING}
    return from_args(
        {
            **number,
            "frontend": {"number": 2},
            "replica": {"target": "tiny", "device": "cpu", "torch_threads": 1, "memory": "256MiB"},
            "scheduler": {"rows_max": ROWS},
            "server": {"grpc_port": port, "http_port": port + 1},
        }
    )


def run(config: ClusterConfig, peak: float, from_s: float, to_s: float) -> Any:
    cluster = ClusterRun(config)
    try:
        cluster.start(quiet=True)
        return asyncio.run(play(config, peak, from_s, to_s))
    finally:
        cluster.stop()


# --------------------------------------------------------------------------- verdicts


def p99_steady_s(calls: Sequence[Call]) -> float:
    steady = [call["first"] for call in calls if STEADY.from_s <= call["at"] < STEADY.to_s]
    return float(np.percentile(steady, 99)) if steady else 0.0


def there_and_back(samples: Sequence[Sample]) -> list[str]:
    """Phases in which a replica was started and one stopped."""
    found = []
    for phase in PHASES:
        some = [sample["wanted"] for sample in samples if phase.from_s <= sample["at"] < phase.to_s]
        steps = [after - before for before, after in pairwise(some)]
        if min(steps, default=0) < 0 < max(steps, default=0):
            found.append(phase.name)
    return found


def load_s(samples: Sequence[Sample]) -> float:
    """From when the first replica was wanted until one served."""
    wanted = next((sample["at"] for sample in samples if sample["wanted"]), 0.0)
    return next((sample["at"] for sample in samples if sample["serving"]), wanted) - wanted


def verdicts(
    calls: Sequence[Call], samples: Sequence[Sample], fixed_p99_s: float
) -> dict[str, Any]:
    """Each with its figure and whether it is good."""
    lost = [call for call in calls if call["error"]]
    first = min(calls, key=lambda call: call["at"])
    cold_s, model_s = first["first"], load_s(samples)
    steady_s, again = p99_steady_s(calls), there_and_back(samples)
    last = samples[-1]
    return {
        "lost": (len(lost), not lost),
        "first token from zero, s": (round(cold_s, 2), cold_s <= model_s + COLD_S_MAX),
        "of that until a replica served, s": (round(model_s, 2), True),
        "p99 of TTFT, steady, over a fixed cluster's": (
            round(steady_s / fixed_p99_s, 2) if fixed_p99_s else None,
            steady_s <= STEADY_MOST * fixed_p99_s,
        ),
        "started and stopped within a phase": (", ".join(again) or "none", not again),
        "replicas left": (last["wanted"], not last["wanted"]),
    }


def picture(real: Any, simulated: Any) -> str:
    """What was wanted and there, the queue, the first token and tokens/s, of both."""

    def over_time(samples: Sequence[Sample], name: str, title: str, unit: str) -> Plot:
        points = [(sample["at"], sample[name]) for sample in samples if sample["at"] >= 0]
        return line(points, title, "s", unit)

    def firsts(calls: Sequence[Call], title: str) -> Plot:
        points = sorted((call["at"], call["first"]) for call in calls if not call["error"])
        return line(points, title, "s", "s")

    rows = []
    names = ("wanted", "serving", "waiting", "tokens_per_s")
    titles = ("Replicas wanted", "Replicas that serve", "Requests that wait", "Tokens/s")
    for name, title in zip(names, titles, strict=True):
        unit = title.lower()
        rows.append(
            [
                over_time(real[1], name, f"{title}: real, up to 4", unit),
                over_time(simulated[1], name, f"{title}: simulated, up to {REPLICAS}", unit),
            ]
        )
    rows.append(
        [firsts(real[0], "To the first token: real"), firsts(simulated[0], "The same, simulated")]
    )
    return to_svg(rows)


def main() -> int:
    """Parse the command line, play, judge, write. Returns the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--peak", type=float, default=8.0, help="requests/s at the peak, of both")
    parser.add_argument("--grpc-port", type=int, default=9240)
    parser.add_argument("--plot", type=Path, help="write the picture here, as SVG")
    args = parser.parse_args()
    if not LOCUST.exists():
        print("Locust is not installed: make loadtest", file=sys.stderr)
        return 2
    begun_load = os.getloadavg()[1]
    theirs, ours, samples = run(settings(None, args.grpc_port), args.peak, 0.0, END_S)
    calls = [*theirs, *ours]
    steady = [
        sample["serving"] for sample in samples if STEADY.from_s <= sample["at"] < STEADY.to_s
    ]
    number = int(np.median(steady)) if steady else 1
    burst = SECOND_BURST
    fixed = run(settings(number or 1, args.grpc_port + 2), args.peak, burst.from_s, burst.to_s)
    fixed_p99_s = p99_steady_s([*fixed[0], *fixed[1]])
    config = settings(None, args.grpc_port)
    virtual = simulate(load_s(samples), synthetic_spec(config.replica))
    found = verdicts(calls, samples, fixed_p99_s)
    rows = [(name, value, "yes" if good else "NO") for name, (value, good) in found.items()]
    print(table(("verdict", "figure", "good"), rows))
    print(f"{len(theirs)} calls by Locust, {len(ours)} over gRPC; {number} replicas when steady")
    print(*sorted({call["error"] for call in calls if call["error"]}), sep="\n")
    print(f"load of the machine, 5 minutes: {begun_load:.1f}, then {os.getloadavg()[1]:.1f}")
    written = {
        "peak_per_s": args.peak,
        "load_average": [begun_load, os.getloadavg()[1]],
        "autoscaling": AUTOSCALING,
        "verdicts": {name: value for name, (value, _) in found.items()},
        "steady_p99_s": [p99_steady_s(calls), fixed_p99_s],
        "replicas_most": max(sample["serving"] for sample in samples),
        "simulated_replicas_most": max(sample["serving"] for sample in virtual.samples),
        "simulated_replicas_left": virtual.samples[-1]["wanted"],
        "simulated_there_and_back": there_and_back(virtual.samples),
        "samples": [{key: round(x, 1) for key, x in sample.items()} for sample in samples],
    }
    write_json(args.json, written)
    if args.plot:
        args.plot.write_text(picture((calls, samples), (virtual.calls, virtual.samples)))
    return 0 if all(good for _, good in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
