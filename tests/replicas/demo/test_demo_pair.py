"""Proves that the embedded pair is small and complete, and that its draft pays.

The steps are simulated with plain transformers models and no cache, so nothing of the serving
system can make the figure look better.
"""

import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from replicas.demo import DRAFT_DIR, TARGET_DIR
from replicas.demo.corpus import is_held_out, topic_documents

BYTES_MAX = 16_000_000
K = 4
NEW_TOKENS = 48
PROMPT_TOKENS = 32
PROMPTS = 12
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TARGET_DIR)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(TARGET_DIR).eval()


@pytest.fixture(scope="module")
def draft() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(DRAFT_DIR).eval()


def held_out_prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Stretches of language-reference topics that the training never saw."""
    prompts = []
    for document in topic_documents():
        if is_held_out(document.name):
            ids = tokenizer(document.text).input_ids
            prompts += [ids[at : at + PROMPT_TOKENS] for at in range(0, len(ids) - 40, 300)]
    return prompts[:: max(1, len(prompts) // PROMPTS)][:PROMPTS]


def greedy(model: LlamaForCausalLM, ids: list[int], tokens: int) -> list[int]:
    """The model's next `tokens` tokens, the whole prefix computed anew for each."""
    text = list(ids)
    for _ in range(tokens):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


def test_the_files_are_complete_and_small() -> None:
    for directory in (TARGET_DIR, DRAFT_DIR):
        assert {path.name for path in directory.iterdir()} == FILES
    files = [path for directory in (TARGET_DIR, DRAFT_DIR) for path in directory.iterdir()]
    assert sum(path.stat().st_size for path in files) <= BYTES_MAX


def test_the_package_imports_without_torch() -> None:
    code = "import sys, replicas.demo; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_target_is_deep_and_the_draft_a_fraction_of_it(
    target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    assert target.config.num_hidden_layers >= 12
    assert draft.config.num_hidden_layers / target.config.num_hidden_layers <= 0.2
    assert target.config.max_position_embeddings == draft.config.max_position_embeddings == 1024


def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in ("The for statement is", "a\n    b\t c", "naïve — 😀", "", " lead and trail \n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_target_keeps_its_sense_to_the_end_of_the_context(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = "\n\n".join(d.text for d in topic_documents() if is_held_out(d.name))
    ids = torch.tensor([tokenizer(text).input_ids[:1024]])
    with torch.inference_mode():
        logits = target(ids).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert loss[768:].mean() < loss[:256].mean() + 1.0


def test_eos_follows_the_end_of_a_text_and_ends_generation(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Eos is learned, not only legal: somewhere in held-out text it is among the likeliest."""
    eos = tokenizer.eos_token_id
    ends = [d.text for d in topic_documents() if is_held_out(d.name)]
    with torch.inference_mode():
        ranks = []
        for text in ends:
            logits = target(torch.tensor([tokenizer(text).input_ids[-200:]])).logits[0, -1]
            ranks.append(int((logits > logits[eos]).sum()))
    assert min(ranks) < 64


def test_steps_commit_at_least_2_8_tokens_at_k_4(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    steps = committed = 0
    with torch.inference_mode():
        for prompt in held_out_prompts(tokenizer):
            text = list(prompt)
            while len(text) < len(prompt) + NEW_TOKENS:
                proposed = greedy(draft, text, K)
                logits = target(torch.tensor([text + proposed])).logits[0, len(text) - 1 :]
                wanted = logits.argmax(-1).tolist()  # k + 1 tokens, the last is the bonus
                accepted = 0
                while accepted < K and proposed[accepted] == wanted[accepted]:
                    accepted += 1
                text += wanted[: accepted + 1]
                steps, committed = steps + 1, committed + accepted + 1
    assert committed / steps >= 2.8
