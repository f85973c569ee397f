"""What a head sees of its target, and what it shall guess: computed once, kept beside the ids.

Of each token of a conversation: the target's hidden states after the head's layers, in bfloat16 (of
the last layer those before the norm, as heads are served), and its likeliest next tokens with their
probabilities. Each part of a conversation folder has a part here, which appears whole or not at
all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from replicas.errors import TrainingRefused
from replicas.training.conversations import Conversation, ConversationFolder, read_part

LIKELY = 64
"""Next tokens that are kept; the rest of the probability is left out."""
PASS_TOKENS = 2048
"""Of a forward pass, padding included."""


def token_bytes(hidden: int) -> int:
    """Bytes per token for so many numbers of hidden states."""
    return 2 * hidden + LIKELY * (4 + 2)


@dataclass(frozen=True)
class Features:
    """Of one conversation."""

    conversation: Conversation
    hidden: torch.Tensor  # [tokens, aux layers * width], bfloat16
    likely: torch.Tensor  # [tokens, LIKELY], int32, the likeliest first
    chances: torch.Tensor  # [tokens, LIKELY], bfloat16


class FeatureFolder:
    def __init__(self, folder: Path, width: int) -> None:
        """`width`: numbers of hidden states per token."""
        self.folder, self.width = folder, width
        folder.mkdir(parents=True, exist_ok=True)
        self._open: dict[Path, _Part] = {}

    def fill(
        self,
        conversations: ConversationFolder,
        target: PreTrainedModel,
        aux_layers: Sequence[int],
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[int]:
        """Compute what is missing; tokens done after each pass. Raises OSError, and TrainingRefused
        where the last layer is asked for and cannot be told."""
        for part in conversations.parts:
            made = self.folder / part.stem
            if made.is_dir():
                continue
            writing = made.with_suffix(".part")
            shutil.rmtree(writing, ignore_errors=True)
            yield from _write(
                writing, list(read_part(part)), target, aux_layers, self.width, stopped
            )
            if stopped():
                return
            writing.rename(made)

    def missing(self, conversations: ConversationFolder) -> list[Path]:
        return [part for part in conversations.parts if not (self.folder / part.stem).is_dir()]

    def read(self, part: Path, index: int) -> Features:
        """Of conversation `index` of a part of the conversation folder."""
        if part not in self._open:
            self._open[part] = _Part.open(part, self.folder / part.stem, self.width)
        return self._open[part].read(index)


@dataclass(frozen=True)
class _Part:
    conversations: list[Conversation]
    begins: list[int]
    hidden: np.ndarray
    likely: np.ndarray
    chances: np.ndarray

    @classmethod
    def open(cls, part: Path, folder: Path, width: int) -> _Part:
        conversations = list(read_part(part))
        begins = [0]
        for each in conversations:
            begins.append(begins[-1] + len(each.ids))
        shapes = _shapes(begins[-1], width)
        arrays = {
            name: np.memmap(folder / name, dtype, "r", shape=shape)
            for name, (dtype, shape) in shapes.items()
        }
        return cls(conversations, begins, **arrays)

    def read(self, index: int) -> Features:
        begin, end = self.begins[index], self.begins[index + 1]
        hidden, likely, chances = (
            torch.from_numpy(np.array(array[begin:end]))
            for array in (self.hidden, self.likely, self.chances)
        )
        return Features(
            self.conversations[index],
            hidden.view(torch.bfloat16),
            likely,
            chances.view(torch.bfloat16),
        )


def _shapes(tokens: int, width: int) -> dict[str, tuple[type, tuple[int, int]]]:
    return {
        "hidden": (np.int16, (tokens, width)),
        "likely": (np.int32, (tokens, LIKELY)),
        "chances": (np.int16, (tokens, LIKELY)),
    }


@torch.no_grad()
def _write(
    folder: Path,
    conversations: list[Conversation],
    target: PreTrainedModel,
    aux_layers: Sequence[int],
    width: int,
    stopped: Callable[[], bool],
) -> Iterator[int]:
    lengths = [len(each.ids) for each in conversations]
    begins = np.concatenate(([0], np.cumsum(lengths)))
    folder.mkdir()
    arrays = {
        name: np.memmap(folder / name, dtype, "w+", shape=shape)
        for name, (dtype, shape) in _shapes(int(begins[-1]), width).items()
    }
    with contextlib.suppress(AttributeError):  # a hole in a file on a full disk would kill us
        for name, array in arrays.items():
            with (folder / name).open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, array.nbytes)
    done = 0
    for rows in _passes(lengths):
        most = max(lengths[row] for row in rows)
        tokens = torch.zeros((len(rows), most), dtype=torch.int64)
        for at, row in enumerate(rows):
            tokens[at, : lengths[row]] = torch.tensor(conversations[row].ids)
        # Padding stands behind, where causal attention of the others does not see it.
        last = int(target.config.num_hidden_layers)
        with _heard(target, last in aux_layers) as heard:
            out = target(tokens.to(target.device), use_cache=False, output_hidden_states=True)
        seen = (heard[0] if layer == last else out.hidden_states[layer] for layer in aux_layers)
        states = torch.cat(list(seen), -1)
        for at, row in enumerate(rows):
            begin, count = begins[row], lengths[row]
            logits = out.logits[at, :count].float()
            top, ids = logits.topk(LIKELY)
            chances = (top - logits.logsumexp(-1, keepdim=True)).exp()
            for name, value in (
                ("hidden", states[at, :count].bfloat16().view(torch.int16)),
                ("likely", ids.int()),
                ("chances", chances.bfloat16().view(torch.int16)),
            ):
                arrays[name][begin : begin + count] = value.cpu().numpy()
            done += count
        yield done
        if stopped():
            return
    for array in arrays.values():
        array.flush()


@contextlib.contextmanager
def _heard(target: PreTrainedModel, listen: bool) -> Iterator[list[torch.Tensor]]:
    """What the last layer puts out: transformers' own last hidden states have passed the norm."""
    heard: list[torch.Tensor] = []
    if not listen:
        yield heard
        return
    layers: Any = getattr(target.base_model, "layers", None)
    if layers is None:
        raise TrainingRefused(f"target: {type(target).__name__} has no layers to look behind")

    def hear(layer: nn.Module, inputs: Any, states: Any) -> None:
        heard.append(states[0] if isinstance(states, tuple) else states)

    hook = layers[-1].register_forward_hook(hear)
    try:
        yield heard
    finally:
        hook.remove()


def _passes(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Conversations of about one length together."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and (len(rows) + 1) * lengths[row] > PASS_TOKENS:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
