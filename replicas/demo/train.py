"""Train the demo pair anew, from one seed: `python -m replicas.demo.train --out DIR`.

Shallow model, grown target, the target's own texts, distilled draft. Writes DIR/target and
DIR/draft, each a complete transformers directory, and DIR/training.json with the losses. Knows
the order of the stages and their budgets, nothing of how each is done.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM

from replicas.demo.corpus import build_corpus
from replicas.demo.distill import distill, write_texts
from replicas.demo.grow import DRAFT_LAYERS, TARGET_LAYERS, grow, new_model, save_model
from replicas.demo.optimise import Schedule, optimise, prepare_machine
from replicas.demo.tokens import TokenStore, train_tokenizer

SEED = 20
STAGES = ("shallow", "target", "draft")
SHAPES = [(16, 256)] * 7 + [(4, 1024)]  # every eighth batch reaches the end of the context


def train_pair(out: Path, first_stage: str = STAGES[0]) -> dict[str, float]:
    """Run the stages from `first_stage` on; return the figures that are also written.

    A stage draws from its own seed and starts from what the one before it saved, so resuming gives
    what running through gives.
    """
    began = time.monotonic()
    corpus = build_corpus()
    record = out / "training.json"
    first = STAGES.index(first_stage)
    figures: dict[str, float] = json.loads(record.read_text()) if first else {}
    if first == 0:
        tokenizer = train_tokenizer(corpus.train)
        for name in ("target", "draft"):
            tokenizer.save_pretrained(out / name)
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    train, held_out = (TokenStore(side, tokenizer) for side in (corpus.train, corpus.held_out))
    for number, stage in enumerate(STAGES[first:], first):
        rng = prepare_machine(SEED + number)
        if stage == "shallow":
            figures["train_tokens"] = sum(map(len, train.ids))
            figures["train_tokens_per_pass"] = train.pass_tokens()
            figures["held_out_tokens"] = sum(map(len, held_out.ids))
            model = new_model(DRAFT_LAYERS, train.eos_id)
            schedule = Schedule(600, 4e-3, 3e-3, decay=0.4)
            loss = _learn(stage, model, train, schedule, rng)
        elif stage == "target":
            model = grow(_load(out / "draft"), TARGET_LAYERS)
            # A higher rate, held longer, only stirred: the loss fell when the rate did.
            schedule = Schedule(320, 2.5e-3, 1.5e-3, decay=0.95)
            loss = _learn(stage, model, train, schedule, rng)
        else:
            target, model = _load(out / "target"), _load(out / "draft")
            texts = write_texts(target, train, 5, rng)
            schedule = Schedule(160, 2.5e-3, 1.5e-3, decay=0.8)
            loss = distill(target, model, train, texts, schedule, rng)
        where = out / ("target" if stage == "target" else "draft")
        save_model(model, where)
        figures[f"{stage}_train_loss"] = loss
        figures[f"{stage}_held_out_loss"] = held_out_loss(_load(where), held_out)
        figures[f"{stage}_minutes"] = (time.monotonic() - began) / 60
        began = time.monotonic()
        record.write_text(json.dumps(figures, indent=2) + "\n")
        print(figures, flush=True)
    return figures


def _load(directory: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _learn(
    name: str, model: LlamaForCausalLM, store: TokenStore, schedule: Schedule, rng: random.Random
) -> float:
    """Next-token training on the corpus; returns the final loss in nats per token."""

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        # Measured at these widths: plain attention trains faster on short rows, fused on long.
        model.set_attn_implementation("eager" if batch.shape[1] <= 256 else "sdpa")
        logits = model(batch, use_cache=False).logits
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten()
        )

    last = optimise(name, model, store.batches(SHAPES, rng), loss_of, schedule)
    model.set_attn_implementation("sdpa")
    return last


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, store: TokenStore, length: int = 512) -> float:
    """Mean loss in nats per token over all packed held-out rows of `length` tokens."""
    stream = store.stream(random.Random(0))
    rows = store.pass_tokens() // length
    flat = [next(stream) for _ in range(rows * length)]
    losses = []
    for batch in torch.split(torch.tensor(flat).view(rows, length), 8):
        logits = model(batch, use_cache=False).logits[:, :-1].flatten(0, 1)
        losses += [functional.cross_entropy(logits, batch[:, 1:].flatten()).item()] * len(batch)
    return statistics.fmean(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the pair to")
    parser.add_argument(
        "--first-stage",
        choices=STAGES,
        default=STAGES[0],
        help="resume here; until the last stage ends, draft/ holds the shallow model",
    )
    arguments = parser.parse_args()
    train_pair(arguments.out, arguments.first_stage)


if __name__ == "__main__":
    main()
