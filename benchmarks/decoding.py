"""What a step costs more with eight grammars, with log-probabilities, with penalties.

    python -m benchmarks.decoding --target DIR --questions spec_bench.jsonl --json out.json

All ways answer the same questions side by side on one replica, at a fixed number of draft tokens by
an oracle with acceptance rate 0.7. The time is the replica's own per step, over that of the plain
way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from benchmarks.drafters import asked, question_parser, replica_config
from benchmarks.shared.measured import MeasuredWay, side_by_side
from benchmarks.shared.oracle import OracleDrafter
from benchmarks.shared.report import write_json
from replicas.decoding import load_grammars
from replicas.grammars import grammar_of
from replicas.models import resolve
from replicas.pair import load_pair
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.messages import Request, StepResult

PLAIN = "plain"
ITEMS: Sequence[dict[str, Any]] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"enum": ["yes", "no", "maybe"]},
    {"type": "string", "pattern": "^[A-Z][a-z]+( [a-z]+)*$"},
    {"type": "array", "items": {"type": "boolean"}},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 20}]},
)
GRAMMARS = [
    grammar_of("json_schema", [json.dumps({"type": "array", "items": items, "minItems": 1000})])
    for items in ITEMS
]
"""Of lists that no answer completes, so that all ways write as many tokens."""


def asking(number: int, request: Request, way: str) -> Request:
    count = len(request.prompt)
    decoding = {
        PLAIN: None,
        "grammars": Decoding(count, grammar=GRAMMARS[number % len(GRAMMARS)]),
        "top-5 logprobs": Decoding(count, logprobs=5),
        "penalties": Decoding(
            count, repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.5
        ),
    }[way]
    # None ends at a stop token, so that all ways have the same rows to their end.
    return replace(request, stop_token_ids=(), decoding=decoding, id=f"{way} {request.id}")


class AskingWay(MeasuredWay):
    """Asks for one thing more in each request; keeps the seconds of a step, the median over its
    batches, of each run."""

    def __init__(self, way: str, *args: Any) -> None:
        super().__init__(*args)
        self._way = way
        self.step_s: list[float] = []

    def begin(self, requests: Sequence[Request]) -> None:
        super().begin([asking(*each, self._way) for each in enumerate(requests)])

    def _figures(self, results: Sequence[StepResult]) -> Any:
        full = [result for result in results if result.steps]
        most = max(len(result.rows) for result in full)
        same = [result.times.total_s / result.steps for result in full if len(result.rows) == most]
        self.step_s.append(median(same))
        return super()._figures(results)


def main() -> None:
    parser = question_parser(__doc__, n=4, new_tokens=96, batches=[8])
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve(args.target))
    requests = [request for kind in asked(args, tokenizer).values() for request in kind]
    config = replica_config(args, {"method": "none"})
    blocks = config.num_gpu_blocks_override
    assert blocks is not None
    # Each of four ways has its own sequences there.
    config = config.model_copy(update={"num_gpu_blocks_override": 4 * blocks})
    pair = load_pair(config)
    oracle = OracleDrafter([], 0.7, pair.vocab_size, ragged=False)
    replica = Replica(pair, config, drafter=oracle)
    replica.grammars = load_grammars(config, replica.spec.embedding_size)
    figures: dict[str, Any] = {"settings": vars(args)}
    for batch in args.batches:
        settings = SchedulerConfig(rows_max=batch, draft_len=args.k)
        ways = {
            name: AskingWay(name, replica, settings)
            for name in (PLAIN, "grammars", "top-5 logprobs", "penalties")
        }
        for way in ways.values():
            outputs = way(requests)
            pairs = zip(requests, outputs, strict=True)
            oracle.learn([[*request.prompt, *tokens] for request, tokens in pairs])
            way.step_s.clear()
        side_by_side(ways, requests, args.rounds, [[] for _ in requests])
        for name, way in ways.items():
            over = [a / b for a, b in zip(way.step_s, ways[PLAIN].step_s, strict=True)]
            figures[f"batch {batch}, {name}"] = {
                "ms": 1e3 * median(way.step_s),
                "over_plain": median(over),
                "committed_per_step": way.figures.committed_per_step,
            }
            print(
                f"batch {batch}, {name}: {1e3 * median(way.step_s):.2f} ms a step,"
                f" {median(over):.3f} of plain, {way.figures.committed_per_step:.2f} tokens",
                flush=True,
            )
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
