"""Proves: an end of text that the target can never choose, because its embedding lacks the token,
is none of the target's ends: texts, conversations and structures are served. A client's own stop
token outside the vocabulary is still refused. So is a text that the tokenizer has no tokens for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cluster.frontend.target_text import TargetText
from replicas.decoding import load_grammars
from replicas.demo import TARGET_DIR
from replicas.replica import Replica
from tests.cluster.fakes import CONTEXT
from tests.cluster.frontend.http_rig import ASKED, PAIR, load_tiny, post, served

CHAT: tuple[str, dict[str, Any]] = ("chat/completions", {"messages": ASKED})
TEXT: tuple[str, dict[str, Any]] = ("completions", {"prompt": "x"})
CHOICE = {"structured_outputs": {"choice": ["yes"]}}


@pytest.mark.parametrize("of_tokenizer", [True, False])
async def test_an_end_that_cannot_be_chosen_is_left_out(of_tokenizer: bool, tmp_path: Path) -> None:
    """`of_tokenizer`: whether the tokenizer has such a token, which llguidance cannot read."""
    path = tmp_path / "target"
    shutil.copytree(TARGET_DIR, path)
    encoder = AutoTokenizer.from_pretrained(path)
    encoder.chat_template = "{{ messages[0].content }}"
    if of_tokenizer:
        encoder.add_special_tokens({"eos_token": "<|end of turn|>"})
    encoder.save_pretrained(path)
    whole = TargetText.load(PAIR)
    wrong_ids = [-1, max(whole.embedding_size, len(encoder)), encoder.eos_token_id]
    file = path / "generation_config.json"
    settings = json.loads(file.read_text()) | {"eos_token_id": [*whole.eos_token_ids, *wrong_ids]}
    file.write_text(json.dumps(settings))
    config = PAIR.model_copy(update={"target": str(path)})
    text = TargetText.load(config)
    assert text.eos_token_ids == text.end_of_turn_ids == whole.end_of_turn_ids
    assert (encoder.eos_token_id >= text.embedding_size > 0) == of_tokenizer

    def load() -> Replica:
        replica = load_tiny()
        replica.grammars = load_grammars(config, replica.spec.embedding_size)
        return replica

    async with served(text=text, load=load) as (_made, app):
        for where, prompt in (CHAT, TEXT):
            for fields in ({}, *([] if of_tokenizer else [CHOICE])):
                answer = await post(app, where, **prompt, **fields, max_tokens=8)
                assert answer.status == 200, answer.body
            wrong = await post(app, where, **prompt, stop_token_ids=wrong_ids[1:2])
            assert (wrong.status, wrong.error["param"]) == (400, "stop_token_ids")
    if not of_tokenizer:
        assert answer.json["choices"][0]["text"] == "yes"


async def test_a_text_that_has_no_tokens_is_refused() -> None:
    """Of a tokenizer without a token for unknown words."""
    made = Tokenizer(models.WordLevel({"x": 0, "</s>": 1}))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = PreTrainedTokenizerFast(tokenizer_object=made, chat_template="{{ messages }}")
    text = TargetText(made, (1,), CONTEXT, encoder)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("completions", {"prompt": "x y"}, "prompt"),
        ("completions", {"prompt": "x", "bad_words": ["y"]}, "bad_words"),
        ("chat/completions", {"messages": ASKED}, "messages"),
        ("/tokenize", {"prompt": "x y"}, "prompt"),
    ]
    async with served(text=text, replicas=0) as (_made, app):
        for where, fields, param in cases:
            answer = await post(app, where, **fields)
            assert (answer.status, answer.error["param"]) == (400, param)
