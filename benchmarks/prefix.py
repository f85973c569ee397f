"""What sharing a prefix saves: requests behind one system prompt, with sharing on and off.

One process, one pair, two replicas over it that take turns round by round; a closed loop of
`--in-flight` requests whose prompts are the same `--system` tokens and then held-out text of their
own. Each round has its own salt, so the first request of a round finds nothing. Outputs are
compared.

    python -m benchmarks.prefix --json benchmarks/results/prefix.json
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from benchmarks.shared.command_line import add_pair, pair_config, parser_of
from benchmarks.shared.prompts import benchmark_tokens
from benchmarks.shared.report import table, write_json
from cluster.bench.arrivals import Closed, Extent, drive
from cluster.bench.engine import over_engine
from cluster.bench.figures import summarise
from cluster.local.engine import LocalEngine
from replicas.models import resolve
from replicas.pair import load_pair
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request


def serve(
    replica: Replica, requests: Sequence[Request], in_flight: int, config: SchedulerConfig
) -> tuple[dict[str, Any], list[list[int]]]:
    """Runs the requests in a closed loop, `in_flight` at a time; figures and outputs."""
    engine = LocalEngine(replica, config)
    send = over_engine(engine, requests.__getitem__)
    extent = Extent(requests=len(requests))
    summary = summarise(asyncio.run(drive(send, Closed(in_flight), extent)))
    assert not summary.failed
    assert summary.ttft_s is not None, "no request gets tokens"
    figures = engine.scheduler.snapshot().figures
    found = {
        "sharing": replica.spec.prefix_sharing,
        "tokens_per_s": summary.tokens_per_s,
        "first_token_p50_s": summary.ttft_s.p50,
        "first_token_p95_s": summary.ttft_s.p95,
        "prefill_tokens": figures.prefill_tokens,
        "reused_tokens": figures.reused_tokens,
    }
    return found, [engine.outputs[request.id].tokens for request in requests]


def main() -> None:
    parser = parser_of(__doc__)
    add_pair(parser)
    parser.add_argument("--system", type=int, default=200, help="tokens that all prompts share")
    parser.add_argument("--own", type=int, default=24, help="tokens of each prompt's own")
    parser.add_argument("--new", type=int, default=32, help="tokens per answer")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    config = pair_config(args)
    pair = load_pair(config)
    replicas = [
        Replica(pair, config.model_copy(update={"prefix_sharing": sharing}))
        for sharing in (False, True)
    ]
    tokenizer = AutoTokenizer.from_pretrained(resolve(args.target))
    texts = benchmark_tokens(tokenizer, args.requests + 16, None, pair.context_len)
    system = tuple(token for text in texts[args.requests :] for token in text)[: args.system]
    pool = SchedulerConfig(rows_max=args.in_flight)

    def requests(salt: str) -> list[Request]:
        return [
            Request(f"q{index}", (*system, *text[: args.own]), args.new, cache_salt=salt)
            for index, text in enumerate(texts[: args.requests])
        ]

    for replica in replicas:  # warm-up
        serve(replica, requests("warm-up")[: args.in_flight], args.in_flight, pool)
    served = [
        serve(replica, requests(f"round {number}"), args.in_flight, pool)
        for number in range(args.rounds)
        for replica in replicas[:: 1 if number % 2 else -1]
    ]
    rounds = [figures for figures, _ in served]
    same = all(outputs == served[0][1] for _, outputs in served)
    rows = []
    for sharing in (False, True):
        mine = [figures for figures in rounds if figures["sharing"] == sharing]
        typical = {name: median(figures[name] for figures in mine) for name in mine[0]}
        first_ms = [1e3 * typical[f"first_token_{part}_s"] for part in ("p50", "p95")]
        counts = [mine[0]["prefill_tokens"], mine[0]["reused_tokens"]]
        rows.append(["on" if sharing else "off", typical["tokens_per_s"], *first_ms, *counts])
    header = ("sharing", "tokens/s", "TTFT p50, ms", "p95", "positions computed", "found")
    print(table(header, rows))
    print(f"outputs identical: {'yes' if same else 'NO'}")
    options = {key: value for key, value in vars(args).items() if key != "json"}
    write_json(args.json, {"options": options, "identical": same, "rounds": rounds})


if __name__ == "__main__":
    main()
