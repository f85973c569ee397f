"""Proves that a file of conversations becomes the tokens that the chat template makes of them, and
that what is wrong with it is said with the number of the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from replicas.demo import TARGET_DIR
from replicas.errors import TrainingRefused
from replicas.training import ConversationFolder, take_in

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SOUND = {
    "messages": [
        {"role": "user", "content": "What is a list?"},
        {"role": "assistant", "content": "A sequence."},
    ]
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(TARGET_DIR)
    made.chat_template = TEMPLATE
    return made


def file_of(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file = path / "data.jsonl"
    file.write_text("\n".join(texts) + "\n")
    return file


def test_conversations_have_the_tokens_of_the_template(tmp_path: Path, tokenizer: Any) -> None:
    other = json.loads(json.dumps(SOUND).replace("list", "tuple"))
    file = file_of(tmp_path, SOUND, "", other, SOUND)
    folder = ConversationFolder(tmp_path / "ids")
    counts = take_in(file, folder, tokenizer, 1024, 4096)
    assert (counts.kept, counts.duplicates) == (2, 1)
    first = next(iter(folder))
    assert tokenizer.decode(first.ids[: first.answer]) == (
        "user: What is a list?<|endoftext|>\nassistant: "
    )
    assert tokenizer.decode(first.ids[first.answer :]) == "A sequence.<|endoftext|>"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[]", "needs `messages`"),
        ({"messages": SOUND["messages"][:1]}, "two turns"),
        ({"messages": [{"role": "user"}, SOUND["messages"][1]]}, r"messages\.0\.content"),
        ({"messages": [{"content": "x"}, SOUND["messages"][1]]}, r"messages\.0 has no role"),
        ({"messages": SOUND["messages"][::-1]}, "the last turn is the user's"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, tokenizer: Any, line: Any, said: str) -> None:
    file = file_of(tmp_path, SOUND, "", line)
    with pytest.raises(TrainingRefused, match=rf"^data: line 3 of .*{said}"):
        take_in(file, ConversationFolder(tmp_path / "ids"), tokenizer, 1024, 4096)


def test_what_does_not_fit_the_target_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    file = file_of(tmp_path, SOUND)
    with pytest.raises(TrainingRefused, match="the target has 64: its tokenizer does not fit"):
        take_in(file, ConversationFolder(tmp_path / "1"), tokenizer, 1024, 64)
    with pytest.raises(TrainingRefused, match="no conversation that can be trained on"):
        take_in(file, ConversationFolder(tmp_path / "2"), tokenizer, 4, 4096)
    plain = AutoTokenizer.from_pretrained(TARGET_DIR)
    with pytest.raises(TrainingRefused, match=r"no chat template.*--chat-template"):
        take_in(file, ConversationFolder(tmp_path / "3"), plain, 1024, 4096)
