"""Train the demo pair anew, from one seed: `python -m replicas.demo.train --out DIR`.

Shallow model, grown target, the target's own texts, distilled draft. Writes DIR/target and
DIR/draft, each a complete transformers directory, and DIR/training.json with the losses. Knows
the order of the stages and their budgets, nothing of how each is done.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from replicas.demo.corpus import build_corpus
from replicas.demo.distill import distill, write_texts
from replicas.demo.grow import (
    DRAFT_LAYERS,
    TARGET_LAYERS,
    grow,
    new_model,
    round_to_half,
    save_model,
)
from replicas.demo.measure import held_out_loss
from replicas.demo.optimise import Schedule, optimise, prepare_machine
from replicas.demo.tokens import TokenStore, save_tokenizer, train_tokenizer

SEED = 20
SHAPES = [(16, 256)] * 7 + [(4, 1024)]  # every eighth batch reaches the end of the context


def train_pair(out: Path, scale: float, seed: int = SEED) -> dict[str, float]:
    """Run every stage with its number of steps times `scale`; return the figures it also writes."""
    began = time.monotonic()
    rng = prepare_machine(seed)
    corpus = build_corpus()
    tokenizer = train_tokenizer(corpus.train)
    train, held_out = (TokenStore(side, tokenizer) for side in (corpus.train, corpus.held_out))
    figures: dict[str, float] = {
        "train_tokens": sum(map(len, train.ids)),
        "train_tokens_per_pass": train.pass_tokens(),
        "held_out_tokens": sum(map(len, held_out.ids)),
    }
    print(figures, flush=True)
    for name in ("target", "draft"):
        (out / name).mkdir(parents=True, exist_ok=True)
        save_tokenizer(tokenizer, out / name)

    draft = new_model(DRAFT_LAYERS, train.eos_id)
    schedule = Schedule(round(600 * scale), 4e-3, 3e-3, decay=0.4)
    figures["shallow_train_loss"] = _learn("shallow", draft, train, schedule, rng)
    figures["shallow_held_out_loss"] = held_out_loss(draft, held_out)
    save_model(draft, out / "draft")
    print(figures, flush=True)

    target = grow(draft, TARGET_LAYERS)
    # A higher rate, held longer, only stirred: the loss fell when the rate did.
    schedule = Schedule(round(700 * scale), 2.5e-3, 1.5e-3, decay=0.8)
    figures["target_train_loss"] = _learn("target", target, train, schedule, rng)
    round_to_half(target)
    save_model(target, out / "target")
    figures["target_held_out_loss"] = held_out_loss(target, held_out)
    print(figures, flush=True)

    texts = write_texts(target, train, round(6 * scale), rng)
    schedule = Schedule(round(200 * scale), 2.5e-3, 1.5e-3, decay=0.8)
    figures["distill_loss"] = distill(target, draft, train, texts, schedule, rng)
    round_to_half(draft)
    save_model(draft, out / "draft")
    figures["draft_held_out_loss"] = held_out_loss(draft, held_out)
    figures["minutes"] = (time.monotonic() - began) / 60
    (out / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(figures, flush=True)
    return figures


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the pair to")
    parser.add_argument(
        "--minutes-scale",
        type=float,
        default=1.0,
        help="factor on every stage's number of steps, and so about on the minutes",
    )
    arguments = parser.parse_args()
    train_pair(arguments.out, arguments.minutes_scale)


if __name__ == "__main__":
    main()
