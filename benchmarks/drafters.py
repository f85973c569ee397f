"""What drafters gain on a target of your own: tokens per second over plain decoding, by category.

    python -m benchmarks.drafters --target DIR --questions spec_bench.jsonl --json out.json

Each way to draft is a replica of its own; all answer the same questions with the target's chat
template, in turns of a fraction of a second, so that they meet the same machine. Questions are JSON
objects, one a line, with `category` and `turns`. Every output is compared with plain decoding's,
and a few with transformers' own `generate`. Suffix decoding is also timed alone, on the host.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

import torch
from transformers import AutoTokenizer

from benchmarks.shared.command_line import parser_of
from benchmarks.shared.measured import MeasuredWay, ratio, side_by_side
from benchmarks.shared.oracle import OracleDrafter, oracle_replica
from benchmarks.shared.report import write_json
from cluster.verify import transformers_greedy
from replicas.config import ReplicaConfig, SpeculativeConfig
from replicas.drafters import DraftRequest, Observation
from replicas.drafters.suffix import SuffixDrafter
from replicas.models import resolve
from replicas.replica import Replica
from replicas.sampling import SamplingBatch
from replicas.stopwatch import Stopwatch
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, Sampling

COPYING = ("summarization", "rag")
"""Categories whose answers repeat their prompts."""
PLAIN = "none"


class FreshWay(MeasuredWay):
    """Its runs do not draft from what earlier runs have answered to the same questions."""

    def begin(self, requests: Sequence[Request]) -> None:
        salt = uuid4().hex
        super().begin([replace(request, cache_salt=salt) for request in requests])


def question_parser(
    about: str, n: int, new_tokens: int, batches: list[int]
) -> argparse.ArgumentParser:
    """A command line for benchmarks that ask questions, with these defaults."""
    parser = parser_of(about)
    parser.add_argument(
        "--target", required=True, help="Directory or hub name, with a chat template."
    )
    parser.add_argument("--questions", required=True, help="Questions in JSON, one a line.")
    parser.add_argument("--n", type=int, default=n, help="Questions of each of two kinds.")
    parser.add_argument("--new-tokens", type=int, default=new_tokens)
    parser.add_argument("--context-len", type=int, default=1536)
    parser.add_argument("--batches", type=int, nargs="+", default=batches)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    return parser


def asked(args: argparse.Namespace, tokenizer: Any) -> dict[str, list[Request]]:
    """Questions of both kinds, drawn evenly from their categories."""
    lines = [json.loads(line) for line in Path(args.questions).read_text().splitlines()]
    rng = random.Random(args.seed)
    rng.shuffle(lines)
    requests: dict[str, list[Request]] = {"copying": [], "other": []}
    of_category: dict[str, int] = {}
    for line in lines:
        category = line["category"]
        kind = "copying" if category in COPYING else "other"
        most = args.n // len(COPYING) if kind == "copying" else max(1, args.n // 10)
        if of_category.get(category, 0) >= most or len(requests[kind]) == args.n:
            continue
        turn = [{"role": "user", "content": line["turns"][0]}]
        encoded = tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        ids = tuple(encoded["input_ids"])
        if len(ids) + args.new_tokens > args.context_len:
            continue
        of_category[category] = of_category.get(category, 0) + 1
        name, stop = f"{line['question_id']}", (tokenizer.eos_token_id,)
        requests[kind].append(Request(name, ids, args.new_tokens, stop_token_ids=stop))
    return requests


def replica_config(args: argparse.Namespace, speculative: dict[str, Any]) -> ReplicaConfig:
    return ReplicaConfig(
        target=args.target,
        speculative_config=SpeculativeConfig(**speculative),
        device=args.device,
        context_len=args.context_len,
        num_gpu_blocks_override=max(args.batches) * args.context_len // 16,
        prefix_sharing=False,
    )


def suffix_alone(contents: Sequence[Sequence[int]], length: int = 10_000) -> dict[str, float]:
    """Microseconds per row and step at so many tokens of context, all of suffix decoding's work,
    beside 1,000 outputs of 256 tokens."""
    text = [token for content in contents for token in content]
    while len(text) < length + 2000:
        text += text
    drafter, device = SuffixDrafter(), torch.device("cpu")
    for number in range(1000):
        begin = number * 37 % (len(text) - 256)
        drafter.begin("said", [0], "", 0)
        table = torch.zeros((1, 1), dtype=torch.int64)
        drafter.observe(Observation(["said"], [[0]], [(0, 0)], table, [text[begin : begin + 256]]))
        drafter.end("said")
    rows = [f"{row}" for row in range(8)]
    table = torch.zeros((8, 1), dtype=torch.int64)
    content = text[:length]
    for row in rows:
        drafter.begin(row, content, "", 0)
    sampling = SamplingBatch.of([Sampling()] * 8, device)
    watch = Stopwatch(device)
    steps = 400
    begun = perf_counter()
    for step in range(steps):
        request = DraftRequest(rows, [content] * 8, [8] * 8, sampling, table)
        drafter.propose(request, watch)
        at = length + 2 * step
        new = [text[at : at + 2]] * 8
        drafter.observe(Observation(rows, [content] * 8, [(0, 0)] * 8, table, new, [8] * 8))
    spent_s = perf_counter() - begun
    return {"suffix_us": 1e6 * spent_s / steps / 8}


def main() -> None:
    parser = question_parser(__doc__, n=12, new_tokens=96, batches=[1, 8])
    parser.add_argument("--fixed", type=int, default=4, help="Draft tokens of the fixed way.")
    parser.add_argument(
        "--head",
        help="Head to run, too, alone and behind suffix decoding; planted:head is never right.",
    )
    methods = ("eagle3", "dflash", "dspark", "clover")
    parser.add_argument("--head-method", choices=methods, default="eagle3", help="What it is.")
    parser.add_argument(
        "--oracle",
        type=float,
        help="Acceptance rate of known answers that cost what the head costs.",
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--references", type=int, default=2, help="Outputs of generate to compare.")
    parser.add_argument("--sampled", action="store_true", help="Temperature 0.7, top-p 0.95.")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve(args.target))
    kinds = asked(args, tokenizer)
    for kind, requests in kinds.items():
        if not requests:
            parser.error(f"--questions, --n: no {kind!r} question among so many of the file")
    if args.sampled:
        args.references = 0  # transformers draws other noise
        for requests in kinds.values():
            requests[:] = [
                replace(request, sampling=Sampling(temperature=0.7, top_p=0.95, seed=number))
                for number, request in enumerate(requests)
            ]
    oracle: OracleDrafter | None = None
    suffix = replica_config(args, {"method": "suffix"})
    replicas = {
        PLAIN: Replica.load(replica_config(args, {"method": "none"})),
        "suffix, k chosen": Replica.load(suffix),
        f"suffix, k {args.fixed}": Replica.load(suffix),
    }
    if args.head is not None:
        speculative = {"method": args.head_method, "model": args.head}
        head = replica_config(args, speculative)
        for name in ("head, k chosen", f"head, k {args.fixed}"):
            replicas[name] = Replica.load(head)
        both = replica_config(args, speculative | {"enable_suffix_decoding": True})
        replicas["suffix and head, k chosen"] = Replica.load(both)
        if args.oracle is not None:
            replicas["oracle, k chosen"], oracle = oracle_replica(head, args.oracle)
    figures: dict[str, Any] = {"settings": vars(args), "ratios": [], "runs": []}
    outputs: list[list[int]] = []
    for kind, requests in kinds.items():
        for batch in args.batches:
            some = requests[: max(4, len(requests) // 2)] if batch == 1 else requests
            ways: dict[str, MeasuredWay] = {}
            for name, replica in replicas.items():
                k = 0 if name == PLAIN else None if name.endswith("chosen") else args.fixed
                config = SchedulerConfig(rows_max=batch, draft_len=k)
                ways[name] = FreshWay(replica, config)
            expected = ways[PLAIN](some)
            outputs += expected
            if oracle is not None:
                pairs = zip(some, expected, strict=True)
                oracle.learn([[*request.prompt, *tokens] for request, tokens in pairs])
            contenders = side_by_side(ways, some, args.rounds, expected)
            by_name = {contender.name: contender for contender in contenders}
            for name in list(ways)[1:]:
                compared = ratio(contenders, name, PLAIN)
                way, contender = ways[name].figures, by_name[name]
                row = {
                    "kind": kind,
                    "batch": batch,
                    "way": name,
                    "over_plain": compared,
                    "tokens_per_s": contender.speed,
                    "plain_tokens_per_s": by_name[PLAIN].speed,
                    "committed_per_step": way.committed_per_step,
                    "acceptance": way.acceptance,
                    "overhead": way.overhead,
                    "identical": contender.identical,
                    "prompts": contender.prompts,
                }
                figures["ratios"].append(row)
                print(
                    f"{kind}, batch {batch}, {name}: {compared:.2f} of plain"
                    f" ({contender.speed:.1f} tokens/s),"
                    f" {way.committed_per_step:.2f} tokens a step,"
                    f" {way.overhead:.1%} outside forward passes,"
                    f" identical {contender.identical} of {contender.prompts}",
                    flush=True,
                )
    few = [request for requests in kinds.values() for request in requests[: args.references]]
    if few:
        config = SchedulerConfig(rows_max=8, draft_len=None)
        drafted = FreshWay(replicas["suffix, k chosen"], config)(few)
        plainly = transformers_greedy(suffix, few, few[0].stop_token_ids)
        same = sum(output == other for output, other in zip(plainly, drafted, strict=True))
        figures["identical to generate"] = [same, len(few)]
        print(f"identical to transformers' generate: {same} of {len(few)}")
    figures |= suffix_alone([*outputs, *(request.prompt for request in few)])
    print(f"suffix alone: {figures['suffix_us']:.1f} us per row and step at 10,000 tokens")
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
