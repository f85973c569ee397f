"""Tokens/s with less and less memory for KV, over those with all that the load would take.

One process, one target, a replica for each budget; rounds in turns. A closed loop of `--in-flight`
requests, with a drafter and without. The whole budget is what all rows in flight need at the end.
Outputs are compared. After SpecMemo (arXiv 2506.01986): 96 % of the throughput at 35 %.

    python -m benchmarks.kv_budget --target smollm2 --method suffix --prompts FILE --json FILE
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared.command_line import parser_of
from benchmarks.shared.prompts import benchmark_tokens
from benchmarks.shared.report import machine, table, write_json
from cluster.bench.arrivals import Closed, Extent, drive
from cluster.bench.engine import over_engine
from cluster.bench.figures import summarise
from cluster.bench.plots import line, to_svg
from cluster.frontend.target_text import TargetText
from cluster.local.engine import LocalEngine
from replicas.config import ReplicaConfig, SpeculativeConfig
from replicas.pair import load_pair
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request

BLOCK = 16


def served(
    replica: Replica, requests: list[Request], in_flight: int
) -> tuple[float, int, list[list[int]]]:
    """Tokens/s, preemptions and outputs of the requests in a closed loop."""
    engine = LocalEngine(replica, SchedulerConfig(rows_max=in_flight))
    send = over_engine(engine, requests.__getitem__)
    summary = summarise(asyncio.run(drive(send, Closed(in_flight), Extent(requests=len(requests)))))
    assert not summary.failed
    preempted = engine.scheduler.snapshot().preempted
    return summary.tokens_per_s, preempted, [engine.outputs[each.id].tokens for each in requests]


def picture(shares: list[float], rows: list[list[Any]]) -> str:
    """Of the table's rows, a share each, as SVG text. Raises ImportError without matplotlib."""
    titles = ("Without a drafter", "With the drafter", "With over without")
    plots = [
        line(
            sorted((100 * share, row[column]) for share, row in zip(shares, rows, strict=True)),
            title,
            "KV memory, % of what the load takes without a limit",
            "tokens/s, ratio" if column == 3 else "tokens/s over those at 100 %",
        )
        for column, title in enumerate(titles, start=1)
    ]
    return to_svg([plots])


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--method", default="suffix")
    parser.add_argument("--model", help="of a head or a draft model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompts", type=Path, help="JSON lines with `prompt` or `turns`")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="at most")
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.7, 0.5, 0.35, 0.25])
    parser.add_argument("--plot", type=Path, help="write the figures as SVG")
    args = parser.parse_args()

    drafting = SpeculativeConfig(method=args.method, model=args.model)
    config = ReplicaConfig(
        target=args.target,
        speculative_config=drafting,
        dtype="float32",
        block_size=BLOCK,
        torch_threads=args.threads,
        prefix_sharing=False,
    )
    encoder = TargetText.load(config).encoder
    texts = benchmark_tokens(encoder, args.requests, args.prompts, args.prompt_tokens)
    lengths = sorted((len(text) + args.new_tokens for text in texts), reverse=True)
    longest = -(-lengths[0] // BLOCK)
    config = config.model_copy(update={"context_len": longest * BLOCK})
    pair = load_pair(config)
    whole = sum(-(-length // BLOCK) for length in lengths[: args.in_flight])
    requests = [Request(f"q{at}", tuple(text), args.new_tokens) for at, text in enumerate(texts)]
    print(machine(), f"{whole} blocks of {BLOCK}")

    replicas = {
        (share, drafts): Replica(
            pair if drafts else replace(pair, draft=None),
            config.model_copy(
                update={"num_gpu_blocks_override": max(longest, round(whole * share))}
            ),
        )
        for share in args.shares
        for drafts in (False, True)
    }
    served(replicas[args.shares[0], True], requests[: args.in_flight], args.in_flight)  # warm-up
    speeds: dict[tuple[float, bool], list[float]] = {key: [] for key in replicas}
    preempted: dict[tuple[float, bool], int] = {}
    outputs: list[list[list[int]]] = []
    for number in range(args.rounds):
        for key in list(replicas)[:: 1 if number % 2 else -1]:
            speed, preempted[key], tokens = served(replicas[key], requests, args.in_flight)
            speeds[key].append(speed)
            outputs.append(tokens)
            print(key, f"{speed:.1f} tokens/s, {preempted[key]} preemptions", flush=True)
    same = all(each == outputs[0] for each in outputs)

    def over_whole(share: float, drafts: bool) -> float:
        pairs = zip(speeds[share, drafts], speeds[args.shares[0], drafts], strict=True)
        return median(speed / whole for speed, whole in pairs)

    rows: list[list[Any]] = [
        [
            f"{100 * share:.0f} %",
            *(over_whole(share, drafts) for drafts in (False, True)),
            median(
                on / off for on, off in zip(speeds[share, True], speeds[share, False], strict=True)
            ),
            preempted[share, False],
            preempted[share, True],
        ]
        for share in args.shares
    ]
    if args.plot is not None:
        args.plot.write_text(picture(args.shares, rows), encoding="utf-8")
    header = ("KV", "without a drafter", "with it", "with over without", "preempted", "with")
    print(table(header, rows))
    print(f"outputs identical: {'yes' if same else 'NO'}")
    options = {key: value for key, value in vars(args).items() if key not in ("json", "plot")}
    write_json(
        args.json,
        {
            "options": options,
            "blocks": whole,
            "identical": same,
            "header": header,
            "rows": rows,
            "tokens_per_s": {f"{share}, {drafts}": v for (share, drafts), v in speeds.items()},
        },
    )


if __name__ == "__main__":
    main()
