"""Which conversations a training step sees, and the tensors that it computes with.

The order follows from a seed and the number of the epoch alone, so a run that goes on from a
checkpoint sees what an undisturbed one sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from replicas.training.conversations import ConversationFolder, read_part
from replicas.training.features import FeatureFolder
from replicas.training.methods import Batch

HELD_OUT = 40
"""One conversation of so many is never trained on."""
_SORTED_TOGETHER = 16
"""Batches whose conversations are sorted by length, so that rows of one are about as long."""


@dataclass(frozen=True)
class Item:
    """One conversation, and where it lies."""

    part: Path
    index: int
    length: int
    answer: int
    """Where the target's answer begins."""
    begin: int
    """A head guesses the tokens after this one."""

    @property
    def guessed(self) -> int:
        """Slots where a head guesses."""
        return self.length - self.begin - 1


def divided(folder: ConversationFolder, tokens: int | None = None) -> tuple[list[Item], list[Item]]:
    """Conversations to train on, and held-out ones; of the first so many tokens.

    A head learns whole conversations: questions are text for which the target has probabilities
    too. It is scored on answers.
    """
    train: list[Item] = []
    held_out: list[Item] = []
    seen = number = 0
    for part in folder.parts:
        for index, each in enumerate(read_part(part)):
            if tokens is not None and seen + len(each.ids) > tokens:
                return train, held_out
            seen += len(each.ids)
            if each.answer_tokens > 1 and each.answer > 0:
                last = number % HELD_OUT == HELD_OUT - 1
                side, begin = (held_out, each.answer) if last else (train, 1)
                side.append(Item(part, index, len(each.ids), each.answer, begin))
                number += 1
    return train, held_out


def epoch_batches(
    items: Sequence[Item], batch_tokens: int, seed: int, epoch: int
) -> list[list[Item]]:
    """All items once, in batches of at most so many tokens, or of one conversation."""
    rng = Random(f"{seed} {epoch}")
    order = list(items)
    rng.shuffle(order)
    batches: list[list[Item]] = []
    window: list[Item] = []
    tokens = 0
    for item in [*order, None]:
        if item is None or tokens + item.length > _SORTED_TOGETHER * batch_tokens:
            batches += _sorted_batches(window, batch_tokens)
            window, tokens = [], 0
        if item is not None:
            window.append(item)
            tokens += item.length
    rng.shuffle(batches)
    return batches


def _sorted_batches(items: list[Item], batch_tokens: int) -> Iterator[list[Item]]:
    batch: list[Item] = []
    tokens = 0
    for item in sorted(items, key=lambda each: each.length):
        if batch and tokens + item.length > batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += item.length
    if batch:
        yield batch


def batch_of(features: FeatureFolder, items: Sequence[Item]) -> Batch:
    """Slots are one fewer than tokens: at the last token nothing follows to be seen."""
    found = [features.read(item.part, item.index) for item in items]
    rows = len(found)
    slots = max(item.length for item in items) - 1
    most = max(item.guessed for item in items)
    tokens = torch.zeros((rows, slots), dtype=torch.int64)
    hidden = torch.zeros((rows, slots, found[0].hidden.shape[1]))
    begins = torch.zeros((rows, most), dtype=torch.int64)
    guesses = torch.zeros((rows, most), dtype=torch.bool)
    width = found[0].likely.shape[1]
    likely = torch.zeros((rows, most, width), dtype=torch.int64)
    chances = torch.zeros((rows, most, width))
    for row, (item, each) in enumerate(zip(items, found, strict=True)):
        ids, begin, guessed = each.conversation.ids, item.begin, item.guessed
        count = len(ids) - 1
        tokens[row, :count] = torch.tensor(ids[1:])
        hidden[row, :count] = each.hidden[:count].float()
        # The slot before token `begin` sees that token and guesses the one after.
        first = begin - 1
        begins[row] = (first + torch.arange(most)).clamp(max=first + guessed - 1)
        guesses[row, :guessed] = True
        likely[row, :guessed] = each.likely[begin : begin + guessed].long()
        chances[row, :guessed] = each.chances[begin : begin + guessed].float()
    return Batch(tokens, hidden, begins, guesses, likely, chances)
