"""Trains a head: updates, rates, checkpoints. Knows neither where data comes from nor what runs it.

With `torch.distributed` started, each process takes its share of every batch and gradients are
added, so an update is the same as that of one process with the whole batch.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from replicas.errors import TrainingRefused
from replicas.training.batches import Item, batch_of, epoch_batches
from replicas.training.features import FeatureFolder
from replicas.training.methods import Batch, TrainableHead, Unrolled

_BROKEN = (*(OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError), UnpicklingError)
"""What torch raises for the content of a file that is no checkpoint of this head."""


@dataclass(frozen=True)
class TrainSettings:
    """How a head is trained. `steps` are updates by the optimizer: the rate rises, stays, and falls
    to zero."""

    steps: int
    batch_tokens: int = 2048
    """Of an update, of one worker."""
    unroll: int = 4
    """Draft tokens that the head learns together."""
    step_weight: float = 0.8
    """What a draft token counts, of the one before."""
    rate: float = 1e-3
    """Largest learning rate of AdamW."""
    warmup: int = 40
    """Updates over which the rate rises."""
    decay: float = 0.2
    """Share of the updates over which the rate falls."""
    weight_decay: float = 0.01
    """Of matrices, of AdamW."""
    clip: float = 1.0
    """Largest norm of all gradients together; longer ones are scaled down."""
    seed: int = 0
    bfloat16: bool = False
    """Whether products of the training are in bfloat16; weights and sums are in float32."""

    @property
    def step_weights(self) -> tuple[float, ...]:
        return tuple(self.step_weight**step for step in range(self.unroll))

    def factor(self, step: int) -> float:
        """Of the rate: linear up, constant, and down as 1 - sqrt (arXiv 2405.18392)."""
        fall_from = self.steps - max(1, round(self.steps * self.decay))
        if step < fall_from:
            return min(1.0, (step + 1) / self.warmup)
        fallen = (step - fall_from + 1) / (self.steps - fall_from + 1)
        return min(1.0, (step + 1) / self.warmup) * (1.0 - math.sqrt(fallen))


@dataclass
class Progress:
    """How far a training is."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Of the epoch: the next."""
    tokens: int = 0
    """Tokens that were guessed at, those of repeated epochs too."""
    seconds: float = 0.0
    """That updates have taken."""
    items: int = 0
    """Conversations that the epoch was drawn from."""


@dataclass(frozen=True)
class Scores:
    """Means over the slots of some conversations, on the target's own text."""

    loss: float
    """At draft position 0, in nats."""
    right: tuple[float, ...]
    """By draft position: share of draft tokens that are the target's likeliest."""
    accepted: float
    """Draft tokens that are right before the first wrong one, of `unroll`."""


class Training:
    def __init__(
        self,
        head: TrainableHead,
        features: FeatureFolder,
        items: Sequence[Item],
        settings: TrainSettings,
    ) -> None:
        self.head, self.settings, self.progress = head, settings, Progress(items=len(items))
        self._features, self._items = features, items
        self._device = next(head.parameters()).device
        self._batches: list[list[Item]] = []
        self._rank, self._ranks = 0, 1
        if dist.is_initialized():
            self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        matrices = [p for p in head.parameters() if p.dim() > 1]
        others = [p for p in head.parameters() if p.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=settings.rate,
            betas=(0.9, 0.95),
        )

    def step(self) -> float:
        """One update by the optimizer; the mean loss per guess over all processes, in nats."""
        progress, settings = self.progress, self.settings
        items = self._next()
        own = items[self._rank :: self._ranks]
        weights = settings.step_weights
        # Each guess counts the same, whichever process makes it.
        guesses = sum(item.guessed for item in items)
        whole = guesses * sum(weights)
        loss = torch.zeros((), device=self._device)
        if own:
            with self._precision():
                out = self.head(self._batch(own), weights, progress.step)
                loss = out.loss / whole
            loss.backward()
        loss = self._summed(loss.detach())
        nn.utils.clip_grad_norm_(self.head.parameters(), settings.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.rate * settings.factor(progress.step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += guesses
        return float(loss)

    def _next(self) -> list[Item]:
        progress = self.progress
        if not self._batches or progress.batch >= len(self._batches):
            if self._batches:
                progress.epoch, progress.batch = progress.epoch + 1, 0
            self._batches = self._drawn()
        if progress.batch >= len(self._batches):  # of a checkpoint at an epoch's end
            progress.epoch, progress.batch = progress.epoch + 1, 0
            self._batches = self._drawn()
        items = self._batches[progress.batch]
        progress.batch += 1
        return items

    def _drawn(self) -> list[list[Item]]:
        tokens = self.settings.batch_tokens * self._ranks
        return epoch_batches(self._items, tokens, self.settings.seed, self.progress.epoch)

    def _summed(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, and all gradients, summed over the processes."""
        if self._ranks == 1:
            return loss
        parameters = list(self.head.parameters())
        flat = torch.cat(
            [loss.view(1)]
            + [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
        )
        dist.all_reduce(flat)
        begin = 1
        for parameter in parameters:
            end = begin + parameter.numel()
            parameter.grad = flat[begin:end].view_as(parameter).clone()
            begin = end
        return flat[0]

    @torch.no_grad()
    def score(self, items: Sequence[Item]) -> Scores:
        """On items that are not trained on, without the engine: what the target wrote is given."""
        steps = self.settings.unroll
        losses, slots, right, accepted = (torch.zeros(steps) for _ in range(4))
        most = self.settings.batch_tokens
        for batch in epoch_batches(items, most, 0, 0):
            with self._precision():
                out: Unrolled = self.head(self._batch(batch), (1.0,) * steps)
            losses += out.losses.cpu()
            slots += out.slots.cpu()
            right += out.right.flatten(1).sum(1).cpu()
            accepted += out.accepted.cpu()
        slots = slots.clamp(min=1)
        return Scores(
            float(losses[0] / slots[0]),
            tuple((right / slots).tolist()),
            float((accepted / slots).sum()),
        )

    def _batch(self, items: Sequence[Item]) -> Batch:
        return batch_of(self._features, items).to(self._device)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self.settings.bfloat16)

    def save(self, path: Path, history: Sequence[dict[str, Any]] = ()) -> None:
        """Write all that the next update depends on, and what was seen on the way; the file is
        there whole or not at all. Raises OSError."""
        part = path.with_suffix(".part")
        state = {
            "progress": asdict(self.progress),
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "history": list(history),
        }
        with part.open("wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # torch's word for what the file system refuses
                raise OSError(f"{path}: {error}") from error
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)

    def load(self, path: Path) -> list[dict[str, Any]]:
        """Go on from a file of `save`; the history in it. Raises OSError where there is none, and
        TrainingRefused for one that does not fit."""
        with path.open("rb") as file:
            content = io.BytesIO(file.read())
        try:
            state = torch.load(content, weights_only=True, map_location="cpu")
            self.head.load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])
            history = list(state["history"])
        except _BROKEN as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TrainingRefused(f"resume: {path} does not fit this run: {reason}") from error
        if self.progress.items != len(self._items):  # other data: its first epoch
            self.progress.items = len(self._items)
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        self._batches = self._drawn()
        return history
