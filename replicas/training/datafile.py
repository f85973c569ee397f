"""Reads conversations from a file as OpenAI's fine-tuning files have them: one JSON object a line,
with `messages`, each with `role` and `content`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replicas.errors import TrainingRefused
from replicas.training.conversations import Conversation, ConversationFolder, DrawCounts

PART_TOKENS = 20_000


def read_conversations(
    file: Path, tokenizer: Any, context_len: int, vocab: int
) -> Iterator[tuple[int, Conversation | None]]:
    """Each line's number and conversation: its last turn is the answer; None for one that is
    longer than the target's context. Empty lines are skipped.

    Raises TrainingRefused with the line's number, and OSError.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise TrainingRefused(
            f"data: {file} has conversations, and the target has no chat template to make tokens"
            " of them; give one with --chat-template"
        )
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                made = _conversation(f"data: line {number} of {file}", line, tokenizer, vocab)
                yield number, made if len(made.ids) <= context_len else None


def _conversation(place: str, line: bytes, tokenizer: Any, vocab: int) -> Conversation:
    try:
        said = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TrainingRefused(f"{place}: not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise TrainingRefused(f"{place}: no JSON: {error}") from None
    turns = said.get("messages") if isinstance(said, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        raise TrainingRefused(f"{place}: needs `messages`, a list of two turns or more")
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise TrainingRefused(f"{place}: messages.{index} has no role")
        if not isinstance(turn.get("content"), str):
            raise TrainingRefused(f"{place}: messages.{index}.content is no text")
    if turns[-1]["role"] != "assistant":
        raise TrainingRefused(
            f"{place}: the last turn is the {turns[-1]['role']}'s, and an answer is the assistant's"
        )
    try:
        question, whole = (
            tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=more)
            for some, more in ((turns[:-1], True), (turns, False))
        )
    except Exception as error:  # a template is a program of the checkpoint's
        raise TrainingRefused(f"{place}: the chat template refuses it: {error}") from None
    if not whole.startswith(question):
        raise TrainingRefused(
            f"{place}: the chat template does not write the answer behind the question"
        )
    before = tokenizer(question, add_special_tokens=False)["input_ids"]
    answer = tokenizer(whole[len(question) :].rstrip("\n"), add_special_tokens=False)["input_ids"]
    if outside := [token for token in (*before, *answer) if not 0 <= token < vocab]:
        raise TrainingRefused(
            f"{place}: token {outside[0]}, and the target has {vocab}: its tokenizer does not fit"
        )
    return Conversation((*before, *answer), len(before))


def take_in(
    file: Path, folder: ConversationFolder, tokenizer: Any, context_len: int, vocab: int
) -> DrawCounts:
    """All conversations of the file, into an empty folder. Raises as `read_conversations`."""
    counts, kept, tokens = DrawCounts(), [], 0
    seen: set[tuple[int, ...]] = set()
    for _, each in read_conversations(file, tokenizer, context_len, vocab):
        if each is None:
            counts.runaways += 1
            continue
        if each.answer_tokens < 2:
            counts.empty += 1
            continue
        if each.ids in seen:
            counts.duplicates += 1
            continue
        seen.add(each.ids)
        kept.append(each)
        tokens += len(each.ids)
        counts.kept += 1
        counts.tokens += len(each.ids)
        counts.answer_tokens += each.answer_tokens
        if tokens >= PART_TOKENS:
            folder.append(kept, counts)
            kept, tokens = [], 0
    if kept:
        folder.append(kept, counts)
    if not counts.kept:
        raise TrainingRefused(f"data: {file} has no conversation that can be trained on")
    return counts
