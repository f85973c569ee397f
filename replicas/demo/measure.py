"""Measure a pair: losses, committed tokens per row and step, forward times, sample texts.

`python -m replicas.demo.measure [--pair DIR]` prints JSON. Knows the plain transformers models
only, not the serving system: what it reports is a property of the weights.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from replicas.demo.corpus import build_corpus
from replicas.demo.distill import continue_prompts, gumbel_noise
from replicas.demo.tokens import CONTEXT, TokenStore

PROMPT_TOKENS = (16, 32, 64, 96, 128, 192, 256)
NEW_TOKENS = 128
SAMPLES = ("The for statement is", "Return a list of", "The module defines the following", "If the")


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


@torch.no_grad()
def loss_by_position(model: LlamaForCausalLM, store: TokenStore) -> list[float]:
    """Held-out loss in each eighth of the context, rows as long as the context."""
    batch = next(store.batches([(24, CONTEXT)], random.Random(0)))
    losses = torch.zeros(CONTEXT - 1)
    for rows in torch.split(batch, 4):
        logits = model(rows, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="none")
        losses += loss.view(len(rows), -1).sum(0) / len(batch)
    return [part.mean().item() for part in losses.chunk(8)]


def committed_per_step(matches: torch.Tensor, k: int) -> tuple[float, list[float]]:
    """Walk the steps. `matches`, bool [rows, tokens]: the draft guesses the token from its prefix.

    Returns committed tokens per row and step, and for each draft position the share of steps
    that reach it in which it is accepted. A guess counts only while all before it in its step
    were right, so guesses from the true prefix are what an autoregressive draft would propose.
    """
    steps = committed = 0
    reached, accepted = [0] * k, [0] * k
    for row in matches.tolist():
        at = 0
        while at + k < len(row):
            step = 0
            while step < k:
                reached[step] += 1
                if not row[at + step]:
                    break
                accepted[step] += 1
                step += 1
            steps, committed, at = steps + 1, committed + step + 1, at + step + 1
    return committed / steps, [a / max(1, r) for a, r in zip(accepted, reached, strict=True)]


@torch.no_grad()
def match_draft(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompts: torch.Tensor,  # [rows, length]
    temperature: float,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's texts [rows, length + new], and where the draft guesses right [rows, new]."""
    rows, length = prompts.shape
    shape = (rows, NEW_TOKENS, target.config.vocab_size)
    noise = gumbel_noise(shape, generator) if temperature > 0 else None
    texts = continue_prompts(target, prompts, NEW_TOKENS, temperature, noise)
    logits = draft(texts[:, :-1], use_cache=False).logits[:, length - 1 :]
    if noise is not None:
        logits = logits / temperature + noise
    return texts, logits.argmax(-1) == texts[:, length:]


def acceptance(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    store: TokenStore,
    temperature: float = 0.0,
    k: int = 4,
    rows: int = 16,
) -> dict[str, object]:
    """Committed tokens per row and step on continuations of held-out prompts of mixed length."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    matches: list[torch.Tensor] = []
    looping: list[bool] = []
    ended = 0
    for length in PROMPT_TOKENS:
        prompts = store.prompts(rows, length, rng)
        texts, match = match_draft(target, draft, prompts, temperature, generator)
        matches.append(match)
        for text in texts[:, length:].tolist():
            looping.append(mostly_repeats(text))
            ended += store.eos_id in text
    every = torch.cat(matches)
    committed, by_position = committed_per_step(every, k)
    varied = every[~torch.tensor(looping)]
    return {
        "temperature": temperature,
        "rows": len(every),
        "committed_per_step": committed,
        "committed_by_prompt_length": {
            n: round(committed_per_step(m, k)[0], 2)
            for n, m in zip(PROMPT_TOKENS, matches, strict=True)
        },
        "acceptance_by_position": by_position,
        "agreement": every.float().mean().item(),
        "share_mostly_repeating": sum(looping) / len(every),
        "committed_per_step_of_the_others": committed_per_step(varied, k)[0]
        if len(varied)
        else 0.0,
        "share_with_eos": ended / len(every),
    }


def mostly_repeats(text: list[int], gram: int = 8) -> bool:
    """Whether fewer than half of the text's stretches of `gram` tokens are new ones."""
    grams = [tuple(text[i : i + gram]) for i in range(len(text) - gram + 1)]
    return len(set(grams)) < 0.5 * len(grams)


@torch.no_grad()
def forward_ms(model: LlamaForCausalLM, rows: int, tokens: int, past: int = 200) -> float:
    """Median time of one cached forward, in milliseconds."""
    cache = DynamicCache(config=model.config)
    model(torch.randint(0, 4096, (rows, past)), past_key_values=cache)
    ids = torch.randint(0, 4096, (rows, tokens))
    times = []
    for _ in range(80):
        began = time.perf_counter()
        model(ids, past_key_values=cache)
        times.append(time.perf_counter() - began)
        cache.crop(-tokens)
    return statistics.median(times[10:]) * 1e3


def forward_times(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> dict[str, float]:
    """Both models' times and their ratio; best of three, other work on the machine disturbs."""
    found: dict[str, float] = {}
    for rows in (1, 8):
        for name, model, tokens in (
            ("target", target, 1),
            ("target", target, 5),
            ("draft", draft, 1),
        ):
            ms = min(forward_ms(model, rows, tokens) for _ in range(3))
            found[f"{name}_{rows}x{tokens}_ms"] = round(ms, 2)
        ratio = found[f"draft_{rows}x1_ms"] / found[f"target_{rows}x1_ms"]
        found[f"ratio_{rows}x1"] = round(ratio, 3)
    return found


def sample_texts(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, new_tokens: int = 60
) -> dict[str, list[str]]:
    """For each temperature, what the target makes of some beginnings."""
    found: dict[str, list[str]] = {}
    for temperature in (0.0, 0.7):
        generator = torch.Generator().manual_seed(0)
        for beginning in SAMPLES:
            prompts = tokenizer(beginning, return_tensors="pt").input_ids
            noise = gumbel_noise((1, new_tokens, target.config.vocab_size), generator)
            with torch.no_grad():
                text = continue_prompts(target, prompts, new_tokens, temperature, noise)
            found.setdefault(str(temperature), []).append(tokenizer.decode(text[0]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, default=Path(__file__).parent)
    pair: Path = parser.parse_args().pair
    torch.set_num_threads(2)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(pair / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    store = TokenStore(build_corpus().held_out, tokenizer)
    files = [path for name in ("target", "draft") for path in (pair / name).iterdir()]
    report = {
        "bytes": sum(path.stat().st_size for path in files),
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "held_out_loss": {
            "target": held_out_loss(target, store),
            "draft": held_out_loss(draft, store),
        },
        "target_loss_by_eighth_of_context": loss_by_position(target, store),
        "greedy": acceptance(target, draft, store),
        "drawn": acceptance(target, draft, store, temperature=1.0),
        "forward": forward_times(target, draft),
        "samples": sample_texts(target, tokenizer),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
