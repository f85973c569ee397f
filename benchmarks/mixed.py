"""Easy and hard prompts in one pool: what choosing the draft length by measurement gains.

Easy: held-out text, greedily. Hard: random tokens of the same lengths, sampled at temperature 4
from the 20 likeliest tokens. Draft and target share their noise, so temperature alone does not part
them: flat distributions agree. Among few tokens that are all as likely they agree only as far as
they mean the same ones. The acceptance of each half is measured and reported beside the speeds. As
long as the same fixed draft length is the best one for both, the ratio says what choosing costs,
not what it gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from benchmarks.measured import MeasuredWay, side_by_side
from cluster.bench.compare import ratio
from cluster.bench.workload import Lengths, synthetic_prompts
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, SamplingParams, Usage

BATCH = 8
HARD = SamplingParams(temperature=4.0, top_k=20)
FIXED = (0, 2, 3, 4, 5, 6)
"""What the chosen draft length is held against: a coarser choice would flatter it."""
CHOSEN = "k chosen"


def mixed_requests(easy: Sequence[Request], vocab_size: int, new_tokens: int) -> list[Request]:
    """Each easy request, followed by a hard one whose prompt is as long."""
    requests = []
    for number, request in enumerate(easy):
        length = len(request.prompt)
        (prompt,) = synthetic_prompts(1, Lengths(length, length), vocab_size, seed=number)
        hard = Request(
            id=f"hard {number}",
            prompt=prompt,
            max_new_tokens=new_tokens,
            sampling=replace(HARD, seed=number),
        )
        requests += [replace(request, id=f"easy {number}", max_new_tokens=new_tokens), hard]
    return requests


def mixed_figures(
    replica: Replica, requests: Sequence[Request], draft_lens: Sequence[int | None], rounds: int
) -> dict[str, object]:
    """Speeds of fixed draft lengths and of the chosen one at batch 8, side by side; whether outputs
    agree with those of k = 0; acceptance of both halves at the longest fixed k."""
    ways = {
        f"k = {k}": MeasuredWay(replica, SchedulerConfig(rows_max=BATCH, draft_len=k))
        for k in FIXED
    }
    if None in draft_lens:
        ways[CHOSEN] = MeasuredWay(replica, SchedulerConfig(rows_max=BATCH, draft_len=None))
    expected = ways["k = 0"](requests)
    contenders = side_by_side(ways, requests, rounds, expected)
    fixed = [each for each in contenders if each.name != CHOSEN]
    best = max(fixed, key=lambda each: each.speed)
    longest = [output.usage for output in ways[f"k = {FIXED[-1]}"].outputs]
    figures: dict[str, object] = {
        "mixed: acceptance of the easy half": _acceptance(longest[0::2]),
        "mixed: acceptance of the hard half": _acceptance(longest[1::2]),
        "mixed: best fixed k": best.name,
    }
    chosen = ratio(contenders, CHOSEN, best.name)
    if chosen is not None:
        figures["mixed: chosen k over the best fixed k"] = chosen.median
        figures["mixed: chosen k over the best fixed k, each round"] = chosen.values
    figures["runs"] = [asdict(each) | {"median": each.speed} for each in contenders]
    for each in contenders:
        rounds_said = ", ".join(f"{value:.0f}" for value in each.tokens_per_s)
        print(
            f"mixed, batch {BATCH}, {each.name:10} {each.speed:7.0f} tokens/s ({rounds_said})"
            f"  identical {each.identical} of {each.prompts}",
            flush=True,
        )
    return figures


def _acceptance(usages: Sequence[Usage]) -> float:
    return sum(usage.accepted_tokens for usage in usages) / sum(
        usage.draft_tokens for usage in usages
    )
