"""The engine alone, in one process: speculation against plain decoding and against transformers.

    python -m benchmarks.engine [--prompts FILE] [--target T --draft D] [--json FILE]

One run, the same prompts everywhere: Lockstep at batch 1, 8, ... and several draft lengths;
transformers' `generate` of the target at the same batch size, and its assisted generation with the
same draft; and whether all outputs are equal. Round by round those of transformers run in turn,
and then Lockstep's own ways side by side: ratios are taken within a round, and the median of the
rounds is reported; so are the shares of where time and reads went, over all rounds. Needs no Ray.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from benchmarks.shared.command_line import add_pair, pair_config, parser_of
from benchmarks.shared.measured import Contender, MeasuredWay, Way, over_rounds, ratio, side_by_side
from benchmarks.shared.prompts import benchmark_tokens
from benchmarks.shared.report import machine, table, write_json
from benchmarks.shared.transformers_runs import Assistance, Transformers, fastest_assistance
from cluster.verify import transformers_model
from replicas.models import resolve
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request

ASSISTED = "transformers assisted, batch 1"


def lockstep_name(batch: int, draft_len: int | None) -> str:
    k = "chosen" if draft_len is None else draft_len
    return f"Lockstep, batch {batch}, k = {k}"


def transformers_name(batch: int) -> str:
    return f"transformers generate, batch {batch}"


def main() -> None:
    """Parse the command line, run everything, print the tables."""
    args = _arguments()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    begun_s = perf_counter()
    config = pair_config(args)
    draft = transformers_model(config, args.draft, "draft")
    models = Transformers(transformers_model(config, args.target), draft)
    replica = Replica.load(config)
    tokenizer = AutoTokenizer.from_pretrained(resolve(args.target))
    prompts = benchmark_tokens(
        tokenizer, args.limit, args.prompts, replica.spec.context_len - args.new_tokens
    )
    requests = [Request(str(i), tuple(tokens), args.new_tokens) for i, tokens in enumerate(prompts)]
    print(machine() | {"threads": torch.get_num_threads()})

    measured = {
        lockstep_name(batch, k): MeasuredWay(replica, SchedulerConfig(rows_max=batch, draft_len=k))
        for batch in args.batches
        for k in args.draft_lens
    }
    print("trying settings of assisted generation", flush=True)
    assistance = fastest_assistance(models, requests)
    print(f"assisted generation is fastest with {assistance}", flush=True)
    print("the reference: transformers' generate at batch 1 over all prompts", flush=True)
    expected = models.batched(requests, 1)
    contenders = greedy(args, models, measured, requests, expected, assistance)
    figures = summary(contenders, measured, args)
    identical = {each.name: f"{each.identical} of {each.prompts}" for each in contenders}
    print(table(("figure: the median where there are rounds", "value"), list(figures.items())))
    print(table(("outputs", "identical"), list(identical.items())))
    print(f"{perf_counter() - begun_s:.0f} s in all")
    write_json(
        args.json,
        {
            "threads": torch.get_num_threads(),
            "prompts": len(requests),
            "prompts_at_batch_1": min(args.alone_limit, len(requests)),
            "prompt_tokens": [len(request.prompt) for request in requests],
            "new_tokens": args.new_tokens,
            "rounds": args.rounds,
            "assistance": str(assistance),
            "figures": figures,
            "identical": identical,
            "runs": [asdict(each) | {"median": each.speed} for each in contenders],
            "steps": {name: asdict(over_rounds(way.runs)) for name, way in measured.items()},
            "steps_of_rounds": {
                name: [asdict(run) for run in way.runs] for name, way in measured.items()
            },
        },
    )


Contenders = tuple[Contender, ...]


def greedy(
    args: argparse.Namespace,
    models: Transformers,
    measured: Mapping[str, MeasuredWay],
    requests: Sequence[Request],
    expected: Sequence[Sequence[int]],
    assistance: Assistance,
) -> Contenders:
    """All greedy runs, by batch size."""
    contenders: Contenders = ()
    for batch in args.batches:
        ways: dict[str, Way] = {transformers_name(batch): partial(models.batched, batch=batch)}
        if batch == 1:
            ways[ASSISTED] = partial(models.assisted, how=assistance)
        ways |= {
            name: measured[name] for name in (lockstep_name(batch, k) for k in args.draft_lens)
        }
        for way in ways.values():
            way(requests[:2])  # warm-up
        for name in ways.keys() & measured.keys():
            measured[name].runs.clear()
        print(f"side by side: {', '.join(ways)}", flush=True)
        counts = dict.fromkeys(ways, args.alone_limit) if batch == 1 else None
        here = side_by_side(ways, requests, args.rounds, expected, counts)
        for each in here:
            _show(each, measured.get(each.name))
        contenders += here
    return contenders


def summary(
    contenders: Contenders, measured: Mapping[str, MeasuredWay], args: argparse.Namespace
) -> dict[str, float | str]:
    """The ratios that matter, each of contenders that ran beside one another."""
    speed = {each.name: each.speed for each in contenders}
    figures: dict[str, float | str] = {}
    for batch in args.batches:
        ours = lockstep_name(batch, None)
        named = {lockstep_name(batch, k): k for k in args.draft_lens if k is not None}
        fixed = max(named, key=speed.__getitem__)
        figures[f"best fixed k, batch {batch}"] = str(named[fixed])
        figures[f"tokens/s, batch {batch}"] = speed[ours]
        others = {
            "over k = 0": lockstep_name(batch, 0),
            "chosen k over the best fixed k": fixed,
            "over transformers' generate": transformers_name(batch),
        }
        if batch == 1:
            others["over transformers' assisted generation"] = ASSISTED
        for name, other in others.items():
            figures[f"{name}, batch {batch}"] = ratio(contenders, ours, other)
        steps = over_rounds(measured[ours].runs)
        figures[f"neither draft nor target forward, batch {batch}"] = steps.overhead
        figures[f"between batches, batch {batch}"] = steps.between_batches
    return figures


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_pair(parser)
    parser.add_argument("--prompts", type=Path, help="JSON lines with `prompt` or `turns`")
    parser.add_argument("--limit", type=int, default=64, help="number of prompts")
    parser.add_argument(
        "--alone-limit", type=int, default=16, help="prompts of the runs at batch 1, the first ones"
    )
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument(
        "--draft-lens",
        type=_draft_len,
        nargs="+",
        default=[None, 0, 2, 4, 6],
        help="'auto' chooses by measurement; it and 0 have to be among them",
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not {None, 0} <= set(args.draft_lens):
        parser.error("--draft-lens: auto and 0 have to be among them")
    return args


def _draft_len(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _show(contender: Contender, way: MeasuredWay | None) -> None:
    rounds = ", ".join(f"{value:.0f}" for value in contender.tokens_per_s)
    line = f"{contender.name:32} {contender.speed:7.0f} tokens/s ({rounds})"
    if way is not None:
        steps = over_rounds(way.runs[-len(contender.tokens_per_s) :])
        line += (
            f"  {steps.committed_per_step:5.2f} tokens/row/step  overhead {steps.overhead:6.1%}"
            f"  between batches {steps.between_batches:6.1%}"
        )
    print(line, flush=True)


if __name__ == "__main__":
    main()
