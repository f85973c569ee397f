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
from replicas.training.features import FeatureFolder, Features
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

    @property
    def guessed(self) -> int:
        """Slots where a head guesses: it never guesses the first token of an answer."""
        return self.length - self.answer - 1


def divided(folder: ConversationFolder, tokens: int | None = None) -> tuple[list[Item], list[Item]]:
    """Conversations to train on, and held-out ones; of the first so many tokens."""
    train: list[Item] = []
    held_out: list[Item] = []
    seen = number = 0
    for part in folder.parts:
        for index, each in enumerate(read_part(part)):
            if tokens is not None and seen + len(each.ids) > tokens:
                return train, held_out
            seen += len(each.ids)
            if each.trained > 1 and each.answer > 0:
                side = held_out if number % HELD_OUT == HELD_OUT - 1 else train
                side.append(Item(part, index, len(each.ids), each.answer))
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
    return collated([features.read(item.part, item.index) for item in items])


def collated(found: Sequence[Features]) -> Batch:
    """Slots are one fewer than tokens: at the last token nothing follows to be seen."""
    rows = len(found)
    slots = max(len(each.conversation.ids) for each in found) - 1
    most = max(each.conversation.trained for each in found) - 1
    tokens = torch.zeros((rows, slots), dtype=torch.int64)
    hidden = torch.zeros((rows, slots, found[0].hidden.shape[1]))
    answers = torch.zeros((rows, most), dtype=torch.int64)
    guesses = torch.zeros((rows, most), dtype=torch.bool)
    width = found[0].likely.shape[1]
    likely = torch.zeros((rows, most, width), dtype=torch.int64)
    chances = torch.zeros((rows, most, width))
    for row, each in enumerate(found):
        ids, answer = each.conversation.ids, each.conversation.answer
        count, guessed = len(ids) - 1, each.conversation.trained - 1
        tokens[row, :count] = torch.tensor(ids[1:])
        hidden[row, :count] = each.hidden[:count].float()
        # The slot before the answer's first token sees that token and guesses the second one.
        first = answer - 1
        answers[row] = (first + torch.arange(most)).clamp(max=first + guessed - 1)
        guesses[row, :guessed] = True
        likely[row, :guessed] = each.likely[answer : answer + guessed].long()
        chances[row, :guessed] = each.chances[answer : answer + guessed].float()
    return Batch(tokens, hidden, answers, guesses, likely, chances)
