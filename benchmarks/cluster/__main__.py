"""What the cluster costs: tokens/s through its doors over the same work without Ray and gRPC.

    python -m benchmarks.cluster [--parts real synthetic] [--in-flight 1 4 16 64] [--json FILE]

For each number of replicas a cluster is started on this machine, and for each number of clients a
closed loop of unary calls, one of streams and one of streams of OpenAI's API run against it. Every
answer is compared with the right tokens. `real` has the demo pair, and as its base one engine in
this process, measured in the same round; `synthetic` has replicas whose steps take a given time,
and as its base the same scheduler over the same number of them in virtual time, where nothing else
takes any. Latencies are the clients'; CPU times are the kernel's, by kind of process.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.cluster.closed_loop import WAYS
from benchmarks.cluster.parts import measure_real, measure_synthetic
from benchmarks.shared.command_line import parser_of
from benchmarks.shared.report import machine, table, write_json
from benchmarks.shared.synthetic import Speed
from cluster.cli.serve import with_paths
from cluster.config import ClusterConfig
from cluster.config_sources import from_args

PARTS = ("real", "synthetic")
HEADER = (
    *("replicas", "in flight", "base tokens/s", "base p50 s"),
    *(f"{way} {what}" for way in WAYS for what in ("/ base", "p50 s", "p99 s")),
    "pool us/batch",
)


def rows_of(entries: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """By HEADER; of several rounds the last one's latencies."""
    rows = []
    for entry in entries:
        row: list[object] = [entry["replicas"], entry["in_flight"]]
        row += [entry["base"][-1]["tokens_per_s"], entry["base"][-1]["latency_s"]["p50"]]
        for way in WAYS:
            last = entry[way]["rounds"][-1]
            row += [entry[way]["ratio"], *last["latency_s"].values()]
        rows.append((*row, entry["unary"]["rounds"][-1]["pool_cpu_us_per_batch"]))
    return rows


def shared_device(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of replicas, several of which may share one GPU."""
    given = {name: getattr(args, name) for name in ("device", "dtype", "memory", "deterministic")}
    return {name: value for name, value in given.items() if value}


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="real ones")
    parser.add_argument("--synthetic-replicas", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests-per-client", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of a synthetic replica")
    parser.add_argument("--prefill-token-ms", type=float, default=0.03, help="the same")
    parser.add_argument("--acceptance", type=float, default=0.7, help="the same")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--batch-size", type=int, help="rows; default: as a server has it")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads, everywhere")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", default="tiny")
    parser.add_argument("--device", help="of the real ones, which share it")
    parser.add_argument("--dtype")
    parser.add_argument("--memory", help="of each real replica, and of the engine beside them")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `prompt` or `turns`")
    parser.add_argument("--grpc-port", type=int, default=9210)
    args = parser.parse_args()

    on_gpu = (args.device or "").startswith("cuda")

    def config_of(replicas: int) -> ClusterConfig:
        config = from_args(
            {
                "replicas": replicas,
                "replica.target": args.target,
                **{f"replica.{name}": value for name, value in shared_device(args).items()},
                **({"actors.replica_gpus": 1 / replicas} if on_gpu else {}),
                "replica.speculative_config": {"method": "draft_model", "model": args.draft},
                "replica.torch_threads": args.threads,
                "pool": {"shards": args.shards},
                "scheduler": {"rows_max": args.batch_size} if args.batch_size else {},
                "server.grpc_port": args.grpc_port,
                "server.http_port": args.grpc_port + 1,
            }
        )
        return with_paths(config)

    size = (args.in_flight, args.requests_per_client, args.new_tokens, args.rounds)
    step_s = args.step_ms / 1000
    speed = Speed(step_s, step_s, 0.0, args.acceptance, args.prefill_token_ms / 1000)
    found: dict[str, Any] = {}
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text())
        # Parts of earlier runs may be of other machines.
        earlier = found.pop("machine", None)
        for each in found.values():
            each.setdefault("machine", earlier)
    print(machine())
    said = ("new_tokens", "rounds", "shards", "batch_size")
    settings = {name: getattr(args, name) for name in said}
    for part in args.parts:
        entries: list[dict[str, Any]] = []
        for replicas in args.synthetic_replicas if part == "synthetic" else args.replicas:
            config = config_of(replicas)
            if part == "synthetic":
                entries += measure_synthetic(config, speed, *size)
            else:
                entries += measure_real(config, args.prompts, *size)
        print(f"\n{part}\n{table(HEADER, rows_of(entries))}")
        own = {"speed": vars(speed)} if part == "synthetic" else {"threads": args.threads}
        way = f"_{args.shards}_shards" * (args.shards > 1)
        found[part + way] = {"machine": machine(), **settings, **own, "runs": entries}
    write_json(args.json, found)


if __name__ == "__main__":
    main()
