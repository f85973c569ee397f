"""Whether every drafter, batch size and draft length gives transformers' own tokens.

    python -m benchmarks.identity --target DIR --questions spec_bench.jsonl --json out.json

Questions are asked with the target's chat template. Greedy outputs are compared with transformers'
`generate` at batch 1, run now; sampled ones with plain decoding at batch 1. Drafters: none, suffix,
an oracle of acceptance 0.7 with ragged drafts, an EAGLE-3 head that is never right. No time counts,
so it may run beside other work; a row that is in the file already is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.drafters import asked, generated, replica_config
from benchmarks.oracle import OracleDrafter
from cluster.local_engine import LocalEngine
from replicas.drafters.eagle3.planted import PLANTED_HEAD
from replicas.models.pair import load_pair, resolve
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, SamplingParams

SAMPLED = SamplingParams(temperature=0.7, top_p=0.95)


def answers(
    replica: Replica, requests: Sequence[Request], batch: int, k: int | None
) -> list[list[int]]:
    engine = LocalEngine(replica, SchedulerConfig(rows_max=batch, draft_len=k))
    return [output.tokens for output in engine.generate(requests)]


def replicas_of(args: argparse.Namespace, known: Sequence[Sequence[int]]) -> dict[str, Replica]:
    """By drafter; `known`: whole sequences, for the oracle."""
    methods: dict[str, dict[str, Any]] = {
        "none": {"method": "none"},
        "suffix": {"method": "suffix"},
        "head": {"method": "eagle3", "model": PLANTED_HEAD},
    }
    made = {name: Replica.load(replica_config(args, said)) for name, said in methods.items()}
    plain = replica_config(args, methods["none"])
    pair = load_pair(plain)
    oracle = OracleDrafter(known, 0.7, pair.vocab_size)
    made["oracle"] = Replica(pair, plain, drafter=oracle)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--questions", required=True, help="Questions in JSON, one a line.")
    parser.add_argument("--n", type=int, default=12, help="Questions of each of two kinds.")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--context-len", type=int, default=1536)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--draft-lens", nargs="+", default=["0", "2", "4", "chosen"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", required=True, help="File of the rows, one by one.")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve(args.target))
    kinds = asked(args, tokenizer)
    greedy = [request for requests in kinds.values() for request in requests]
    sampled = [
        replace(request, id=f"sampled {request.id}", sampling=replace(SAMPLED, seed=number))
        for number, request in enumerate(greedy)
    ]
    path = Path(args.json)
    said: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if "generate" not in said:
        said["generate"] = generated(args.target, greedy)
        path.write_text(json.dumps(said))
    plain = Replica.load(replica_config(args, {"method": "none"}))
    if "sampled" not in said:
        said["sampled"] = answers(plain, sampled, 1, 0)
        path.write_text(json.dumps(said))
    both = ((greedy, said["generate"]), (sampled, said["sampled"]))
    known = [
        [*request.prompt, *tokens]
        for requests, outputs in both
        for request, tokens in zip(requests, outputs, strict=True)
    ]
    replicas = replicas_of(args, known)
    rows = said.setdefault("identical", {})
    for batch in sorted(args.batches, reverse=True):
        for name, replica in replicas.items():
            for k in ("0",) if name == "none" else args.draft_lens:
                for kind, (requests, expected) in zip(("greedy", "sampled"), both, strict=True):
                    row = f"{kind}, {name}, batch {batch}, k {k}"
                    if row in rows:
                        continue
                    got = answers(replica, requests, batch, None if k == "chosen" else int(k))
                    same = sum(a == b for a, b in zip(got, expected, strict=True))
                    rows[row] = [same, len(expected)]
                    print(f"{row}: {same} of {len(expected)}", flush=True)
                    path.write_text(json.dumps(said))


if __name__ == "__main__":
    main()
