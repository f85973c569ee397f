"""A draft that is never right: what choosing the draft length costs where drafting never pays.

The draft has the shape and the tokenizer of the embedded one and random weights, so it guesses one
token in some thousands. Without speculation (k = 0) is what there is to lose against; the chosen
draft length differs from it by what it takes to find out, and to look again now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.measured import MeasuredWay, side_by_side
from cluster.bench.compare import ratio
from replicas.config import ReplicaConfig
from replicas.models.pair import resolve
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request

PLAIN, CHOSEN = "k = 0", "k chosen"


def random_draft(like: str, folder: Path) -> None:
    """Save a draft of that draft's shape and tokenizer with random weights into the folder."""
    source = resolve(like, "draft")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)


def hopeless_figures(
    config: ReplicaConfig, requests: Sequence[Request], batches: Sequence[int], rounds: int
) -> dict[str, object]:
    """The chosen draft length over k = 0 at each batch, side by side, with such a draft."""
    assert config.draft is not None, "the shape of a draft is needed"
    with TemporaryDirectory() as folder:
        random_draft(config.draft, Path(folder))
        replica = Replica.load(config.model_copy(update={"draft": folder}))
    figures: dict[str, object] = {}
    runs = []
    for batch in batches:
        ways = {
            PLAIN: MeasuredWay(replica, SchedulerConfig(rows_max=batch, draft_len=0)),
            CHOSEN: MeasuredWay(replica, SchedulerConfig(rows_max=batch, draft_len=None)),
        }
        asked = requests[: 8 + 2 * batch]
        expected = ways[PLAIN](asked)
        ways[CHOSEN](asked[:1])  # warm-up
        contenders = side_by_side(ways, asked, rounds, expected)
        compared = ratio(contenders, CHOSEN, PLAIN)
        assert compared is not None, "both ways run here"
        name = f"hopeless draft: chosen k over k = 0, batch {batch}"
        figures[name] = compared.median
        figures[f"{name}, each round"] = compared.values
        figures[f"hopeless draft: acceptance, batch {batch}"] = ways[CHOSEN].figures.acceptance
        runs += [asdict(each) | {"batch": batch, "median": each.speed} for each in contenders]
        print(
            f"{name}: {compared.median:.3f}"
            f" ({', '.join(f'{value:.3f}' for value in compared.values)}),"
            f" identical {contenders[1].identical} of {contenders[1].prompts}",
            flush=True,
        )
    figures["runs"] = runs
    return figures
