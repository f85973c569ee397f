"""Whether every drafter, batch size and draft length gives transformers' own tokens.

    python -m benchmarks.identity --target DIR --questions spec_bench.jsonl --json out.json

Questions are asked with the target's chat template. Greedy outputs are compared with transformers'
`generate` at batch 1, run now; sampled ones, and JSON by a schema, without a drafter at batch 1.
Drafters: none, suffix, an oracle with acceptance rate 0.7 and ragged drafts, and an EAGLE-3
checkpoint, alone and with suffix decoding; without --head one of random weights, which lies
beside the file. No time counts, so it may run beside other work; a row that is in the file already
is not run again, and the file is refused where it has other settings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from benchmarks.drafters import asked, question_parser, replica_config
from benchmarks.shared.oracle import OracleDrafter
from cluster.local.engine import LocalEngine
from cluster.verify import transformers_greedy
from replicas.drafters.eagle3.planted_head import planted_head, planted_tensors
from replicas.grammars import grammar_of
from replicas.models import resolve
from replicas.pair import load_pair
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.messages import Request, Sampling

SAMPLED = Sampling(temperature=0.7, top_p=0.95)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"enum": ["yes", "no", "it depends"]},
    {"type": "array", "items": {"type": "string", "maxLength": 24}, "maxItems": 3},
    {
        "type": "object",
        "properties": {
            "answer": {"type": "string", "minLength": 1, "maxLength": 80},
            "certainty": {"type": "integer", "minimum": 0, "maximum": 100},
        },
        "required": ["answer", "certainty"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "language": {"enum": ["English", "German", "other"]},
            "topics": {
                "type": "array",
                "items": {"type": "string", "maxLength": 16},
                "maxItems": 2,
            },
            "needs_sources": {"type": "boolean"},
        },
        "required": ["language", "topics", "needs_sources"],
        "additionalProperties": False,
    },
)
"""None of their documents takes more than some 60 tokens."""


def answers(
    replica: Replica, requests: Sequence[Request], batch: int, k: int | None
) -> list[list[int]]:
    engine = LocalEngine(replica, SchedulerConfig(rows_max=batch, draft_len=k))
    return [output.tokens for output in engine.generate(requests)]


def in_json(request: Request, number: int) -> Decoding:
    schema = json.dumps(SCHEMAS[number % len(SCHEMAS)])
    return Decoding(len(request.prompt), grammar=grammar_of("json_schema", [schema]))


def documents_of(outputs: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, int]:
    """How many came to their end, and how many of those are as their schemas say."""
    ended = [number for number, ids in enumerate(outputs) if ids[-1] == tokenizer.eos_token_id]
    valid = 0
    for number in ended:
        document = json.loads(tokenizer.decode(outputs[number], skip_special_tokens=True))
        valid += Draft202012Validator(SCHEMAS[number % len(SCHEMAS)]).is_valid(document)
    return {"asked": len(outputs), "ended": len(ended), "valid": valid}


NONE = {"method": "none"}
DRAFTERS = ("none", "suffix", "head", "suffix, head", "oracle")


def save_random_head(directory: Path, target: str) -> None:
    """A checkpoint in the original format that drafts from a quarter of the target's tokens."""
    config = planted_head(AutoConfig.from_pretrained(resolve(target)))
    tensors = planted_tensors(config, torch.float32, torch.device("cpu"))
    ids = torch.randperm(config.target_vocab)[: config.vocab_size].sort().values
    tensors["d2t"] = ids - torch.arange(config.vocab_size)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    said = config.layer.to_dict() | {"draft_vocab_size": config.vocab_size}
    (directory / "config.json").write_text(json.dumps(said))


def replica_with(
    name: str, args: argparse.Namespace, plain: Replica, known: Sequence[Sequence[int]]
) -> Replica:
    """`name`: of a drafter; `known`: whole sequences, for the oracle."""
    if name == "none":
        return plain
    if name == "suffix":
        return Replica.load(replica_config(args, {"method": "suffix"}))
    if name in ("head", "suffix, head"):
        head = args.head
        if head is None:
            head = args.json.with_suffix(".head")
            save_random_head(head, args.target)
        speculative = {"method": "eagle3", "model": str(head)}
        return Replica.load(
            replica_config(args, speculative | {"enable_suffix_decoding": name != "head"})
        )
    config = replica_config(args, NONE)
    pair = load_pair(config)
    replica = Replica(pair, config, drafter=OracleDrafter(known, 0.7, pair.vocab_size))
    replica.grammars = plain.grammars
    return replica


def main() -> None:
    parser = question_parser(__doc__, n=12, new_tokens=128, batches=[1, 8, 16])
    parser.add_argument("--draft-lens", nargs="+", default=["0", "2", "4", "chosen"])
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--head", help="EAGLE-3 head of the target.")
    args = parser.parse_args()
    if args.json is None:
        parser.error("--json: needed, for the rows one by one")
    tokenizer = AutoTokenizer.from_pretrained(resolve(args.target))
    kinds = asked(args, tokenizer)
    greedy = [request for requests in kinds.values() for request in requests]
    sampled = [
        replace(request, id=f"sampled {request.id}", sampling=replace(SAMPLED, seed=number))
        for number, request in enumerate(greedy)
    ]
    documents = [
        replace(request, id=f"json {request.id}", decoding=in_json(request, number))
        for number, request in enumerate(greedy)
    ]
    path: Path = args.json
    names = ("target", "questions", "n", "new_tokens", "context_len", "seed", "device", "head")
    settings = {name: getattr(args, name) for name in names}
    said: dict[str, Any] = {"settings": settings}
    if path.exists():
        said = json.loads(path.read_text())
    if said.get("settings") != settings:
        parser.error(f"--json: {path} is of other settings: {said.get('settings')}")
    if "generate" not in said:
        config, ends = replica_config(args, NONE), greedy[0].stop_token_ids
        said["generate"] = list(transformers_greedy(config, greedy, ends))
        path.write_text(json.dumps(said))
    plain = Replica.load(replica_config(args, NONE))
    if "sampled" not in said:
        said["sampled"] = answers(plain, sampled, 1, 0)
        path.write_text(json.dumps(said))
    if "json" not in said:
        said["json"] = answers(plain, documents, 1, 0)
        said["documents"] = documents_of(said["json"], tokenizer)
        path.write_text(json.dumps(said))
    print(f"in JSON: {said['documents']}", flush=True)
    all_kinds = {
        "greedy": (greedy, said["generate"]),
        "sampled": (sampled, said["sampled"]),
        "json": (documents, said["json"]),
    }
    known = [
        [*request.prompt, *tokens]
        for requests, outputs in all_kinds.values()
        for request, tokens in zip(requests, outputs, strict=True)
    ]
    rows = said.setdefault("identical", {})
    for name in args.drafters:
        replica = replica_with(name, args, plain, known)
        for batch in sorted(args.batches, reverse=True):
            for k in ("0",) if name == "none" else args.draft_lens:
                for kind, (requests, expected) in all_kinds.items():
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
