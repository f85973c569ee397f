"""Conversations as token ids: what a drafter is trained on, and the folder in which they lie.

A folder holds numbered parts. A part appears whole or not at all, so a process that is killed loses
only the part that it has not written. Ids take two bytes where the vocabulary allows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_WIDE = 1 << 16


@dataclass(frozen=True)
class Conversation:
    """The ids of a conversation; from `answer` on the target has written them."""

    ids: tuple[int, ...]
    answer: int

    @property
    def answer_tokens(self) -> int:
        return len(self.ids) - self.answer


@dataclass
class DrawCounts:
    """What became of the conversations that a target wrote."""

    kept: int = 0
    tokens: int = 0
    """Of those that were kept."""
    answer_tokens: int = 0
    duplicates: int = 0
    runaways: int = 0
    """Turns without an end within the limit, and those that repeat themselves."""
    empty: int = 0

    @property
    def tried(self) -> int:
        return self.kept + self.duplicates + self.runaways + self.empty

    def said(self) -> str:
        return (
            f"{self.kept} conversations of {self.tokens} tokens; dropped {self.duplicates}"
            f" duplicates, {self.runaways} runaways, {self.empty} empty"
        )


class ConversationFolder:
    """Parts `00000.npz`, `00001.npz`, ... of conversations in order, with what was counted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def parts(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.npz"))

    def append(self, conversations: Sequence[Conversation], counts: DrawCounts) -> None:
        """`counts`: of all parts with this one. Raises OSError."""
        flat = np.array([token for each in conversations for token in each.ids], np.uint32)
        narrow = flat.astype(np.uint16 if flat.size == 0 or flat.max() < _WIDE else np.uint32)
        path = self.folder / f"{len(self.parts):05d}.npz"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez_compressed(
                file,
                ids=narrow,
                lengths=np.array([len(each.ids) for each in conversations], np.int32),
                answers=np.array([each.answer for each in conversations], np.int32),
                counts=np.array(list(vars(counts).values()), np.int64),
            )
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)

    def counts(self) -> DrawCounts:
        """As of the last part."""
        parts = self.parts
        if not parts:
            return DrawCounts()
        with np.load(parts[-1]) as found:
            return DrawCounts(*(int(count) for count in found["counts"]))

    def __iter__(self) -> Iterator[Conversation]:
        for part in self.parts:
            yield from read_part(part)


def read_part(part: Path) -> Iterator[Conversation]:
    """Those of one part, in order. Raises OSError."""
    with np.load(part) as found:
        flat, ends = found["ids"], np.cumsum(found["lengths"])
        for begin, end, answer in zip(ends - found["lengths"], ends, found["answers"], strict=True):
            yield Conversation(tuple(flat[begin:end].tolist()), int(answer))
