"""Teach the draft to guess the target: on the corpus, and on what the target itself writes.

A step accepts a draft token when it equals the target's choice after the same true prefix. So
the texts that count are the target's own continuations, and on them plain teacher forcing is
exactly the situation the draft will meet: what follows a wrong guess is never used.
"""

import random
from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional
from transformers import DynamicCache, LlamaForCausalLM

from replicas.demo.optimise import Schedule, optimise
from replicas.demo.tokens import TokenStore

NEW_TOKENS = 144
PROMPT_TOKENS = (16, 64, 8, 128, 32, 256, 4, 96, 24, 192, 48)


@torch.no_grad()
def continue_prompts(
    model: LlamaForCausalLM,
    prompts: torch.Tensor,  # [rows, length]
    new_tokens: int,
    temperature: float = 0.0,
) -> torch.Tensor:
    """Prompts with their continuations, [rows, length + new_tokens]. An eos ends nothing."""
    cache = DynamicCache(config=model.config)
    texts = [prompts]
    ids = prompts
    for _ in range(new_tokens):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = out.logits[:, -1].float()
        if temperature > 0:
            # Gumbel noise turns an argmax into a draw.
            uniform = torch.rand(tuple(logits.shape)).clamp_(1e-9, 1 - 1e-7)
            logits = logits / temperature - torch.log(-torch.log(uniform))
        ids = logits.argmax(-1, keepdim=True)
        texts.append(ids)
    return torch.cat(texts, 1)


def write_texts(
    target: LlamaForCausalLM, store: TokenStore, rounds: int, rng: random.Random
) -> list[torch.Tensor]:
    """The target's continuations of training prompts, two rounds greedy, one drawn.

    Returns one [rows, length] tensor per round; prompts of one round have one length.
    """
    texts = []
    for i in range(rounds):
        prompts = store.prompts(96, PROMPT_TOKENS[i % len(PROMPT_TOKENS)], rng)
        temperature = 1.0 if i % 3 == 2 else 0.0
        with torch.autocast("cpu", torch.bfloat16):
            texts.append(continue_prompts(target, prompts, NEW_TOKENS, temperature))
        print(f"texts {i + 1}/{rounds}", flush=True)
    return texts


def distill(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    store: TokenStore,
    texts: Sequence[torch.Tensor],
    schedule: Schedule,
    rng: random.Random,
) -> float:
    """Train the draft; the target stands still. Returns the final loss."""

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = target(batch, use_cache=False).logits.float().flatten(0, 1)
        guess = draft(batch, use_cache=False).logits.float().flatten(0, 1)
        log_guess = functional.log_softmax(guess, -1)
        soft = functional.kl_div(
            log_guess, functional.log_softmax(wanted, -1), reduction="batchmean", log_target=True
        )
        hard = functional.nll_loss(log_guess, wanted.argmax(-1))
        return soft + 0.5 * hard

    return optimise("distill", draft, _mixed(store, texts, rng), loss_of, schedule)


def _mixed(
    store: TokenStore, texts: Sequence[torch.Tensor], rng: random.Random
) -> Iterator[torch.Tensor]:
    """Three batches of the target's own text, then one of the corpus, now and then a long one."""
    corpus = store.batches([(16, 256), (16, 256), (4, 1024)], rng)
    own = _own(texts, rng)
    while True:
        for _ in range(3):
            yield next(own)
        yield next(corpus)


def _own(texts: Sequence[torch.Tensor], rng: random.Random) -> Iterator[torch.Tensor]:
    while True:
        pieces = [piece for text in texts for piece in torch.split(text, 16)]
        rng.shuffle(pieces)
        yield from pieces
