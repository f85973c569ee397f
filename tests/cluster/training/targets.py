"""A tiny random target with words for tokens and a chat template, and conversations for it."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.tiny_pairs import SHAPE

WORDS = ["<eos>", "user", "assistant", *(f"w{number}" for number in range(61))]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def save_target(path: Path, template: str | None = TEMPLATE) -> str:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    encoder.chat_template = template
    encoder.save_pretrained(path)
    own = {"vocab_size": len(WORDS), "eos_token_id": 0, "pad_token_id": None, "bos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        LlamaForCausalLM(LlamaConfig(**SHAPE | own)).save_pretrained(path)
    return str(path)


def save_data(path: Path, number: int = 90) -> Path:
    rng = Random(0)
    lines = []
    for _ in range(number):
        question, answer = (" ".join(rng.choices(WORDS[3:], k=9)) for _ in range(2))
        turns = [("user", question), ("assistant", answer)]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path
