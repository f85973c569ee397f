"""A head that learns: what it gets, what comes of it, and the parts that all methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad, rms_norm

from replicas.training.methods.loss import soft_cross_entropy


@dataclass(frozen=True)
class Batch:
    """Conversations side by side. Of each the slots [0, lengths) are its own; those of `begins`
    are those from which it drafts."""

    tokens: torch.Tensor  # [rows, slots], int64: at slot i the token at i + 1
    hidden: torch.Tensor  # [rows, slots, aux layers * target's width]
    begins: torch.Tensor  # [rows, begins], int64: slots, rising; the last one repeated at the end
    guesses: torch.Tensor  # [rows, begins], bool: no repetition
    likely: torch.Tensor  # [rows, begins, n], int64: ids of the target's likeliest tokens at i + 2
    chances: torch.Tensor  # [rows, begins, n], float32: their probabilities

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True)
class Unrolled:
    """What came of a batch. Step j of the pass is draft position j, from 0."""

    loss: torch.Tensor
    """Sum over slots and steps, weighted; where a head looks at some of the slots, times what makes
    it the sum over all."""
    losses: torch.Tensor  # [steps]: sums of the cross-entropy over slots, without gradient
    slots: torch.Tensor  # [steps]: how many
    right: torch.Tensor  # [steps, rows, begins], bool
    """Whether the likeliest token of the head is the target's."""
    accepted: torch.Tensor  # [steps]
    """In how many slots the drafts up to this step are all right, of a draft that began j slots
    before in step j."""


@dataclass(frozen=True)
class Told:
    """Drafts of some slots that were told the text before each of their tokens."""

    loss: torch.Tensor
    """Sum of the cross-entropy, weighted."""
    losses: torch.Tensor  # [steps]: sums, without gradient
    shares: torch.Tensor  # [steps]: the weights
    there: torch.Tensor  # [rows, n, steps], bool: where there is something to guess
    hits: torch.Tensor  # [rows, n, steps], bool: where the likeliest token is the target's
    right: torch.Tensor  # [steps, rows, begins], bool: the same by the slot that is guessed

    @property
    def reached(self) -> torch.Tensor:  # [rows, n, steps], bool
        """Where all tokens before are right, so that acceptance is decided."""
        return self.there & pad(self.hits[..., :-1].cumprod(-1), (1, 0), value=1).bool()

    def unrolled(self, loss: torch.Tensor) -> Unrolled:
        return Unrolled(
            loss,
            self.losses,
            self.there.sum((0, 1)),
            self.right,
            self.hits.cumprod(-1).sum((0, 1)),
        )


class TrainableHead(nn.Module, ABC):
    own_ids: torch.Tensor
    """By the target's id: the head's, or -1."""

    def __init__(
        self,
        config: Any,  # as the drafter reads it from the checkpoint
        tensors: Mapping[str, torch.Tensor],
        frozen: Mapping[str, torch.Tensor],
        ids: torch.Tensor,  # [draft vocabulary], int64: the target's ids, rising
    ) -> None:
        """`tensors` learn, by the names of `config.tensors`; `frozen` ones are the target's."""
        super().__init__()
        self.config = config
        self.weights = nn.ParameterDict(
            {_key(name): nn.Parameter(value.float().clone()) for name, value in tensors.items()}
        )
        for name, value in frozen.items():
            self.register_buffer(_key(name), value.detach().float(), persistent=False)
        of_target = torch.full((config.target_vocab,), -1, dtype=torch.int64)
        of_target[ids] = torch.arange(len(ids))
        self.register_buffer("own_ids", of_target, persistent=False)

    @abstractmethod
    def forward(self, batch: Batch, step_weights: tuple[float, ...], at: int = 0) -> Unrolled:
        """One draft position for each weight. `at`: the number of the update; a head that looks at
        some of the slots looks at others next."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """As `config.tensors` names them."""
        return {name: self._tensor(name).detach() for name in self.config.tensors}

    def _tensor(self, name: str) -> torch.Tensor:
        key = _key(name)
        return self.weights[key] if key in self.weights else self.get_buffer(key)

    def _weight(self, name: str) -> torch.Tensor:
        return self._tensor(f"{name}.weight")

    def _bias(self, name: str) -> torch.Tensor | None:
        found: torch.Tensor | None = self.weights.get(_key(f"{name}.bias"))
        return found

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self._weight(name), self._bias(name))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weight(name)
        return rms_norm(x.float(), weight.shape, weight, self.config.eps)

    def _told(
        self,
        batch: Batch,
        chosen: torch.Tensor,  # [n], int64: where drafts begin, of `batch.begins`
        x: torch.Tensor,  # [rows, n, steps, width]
        weight: torch.Tensor,  # [draft vocabulary, width]
        step_weights: tuple[float, ...],
        fixed: int,
    ) -> Told:
        """`fixed`: see `soft_cross_entropy`."""
        own, chances, best = self._targets(batch)
        most = batch.begins.shape[1]
        shares = x.new_tensor(step_weights, dtype=torch.float32)
        places = chosen[:, None] + torch.arange(len(step_weights), device=chosen.device)
        inside = places.clamp(max=most - 1)
        there = batch.guesses[:, chosen, None] & batch.guesses[:, inside] & (places < most)
        weighted = chances[:, inside] * shares[:, None]
        loss, guessed, each = soft_cross_entropy(
            x[there], weight, own[:, inside][there], weighted[there], fixed
        )
        hits = torch.zeros_like(there)
        hits[there] = guessed == best[:, inside][there]
        steps = torch.arange(len(step_weights), device=chosen.device).expand(there.shape)[there]
        losses = torch.zeros_like(shares).index_add(0, steps, each / shares[steps])
        right = there.new_zeros((len(step_weights), len(there), most + len(step_weights)))
        for step in range(len(step_weights)):
            right[step][:, places[:, step]] = hits[..., step]
        return Told(loss, losses, shares, there, hits, right[..., :most])

    def _targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of `likely`: the head's ids and the chances of those that it has, [rows, begins, n]; and
        the head's id of the likeliest, or -1, [rows, begins]."""
        own = self.own_ids[batch.likely]
        return own.clamp(min=0), batch.chances.masked_fill(own < 0, 0.0), own[..., 0]


def rotated(x: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """`at`: cosines and sines, [..., 1, head_dim]."""
    low, high = x.chunk(2, -1)
    return x * at[0] + torch.cat((-high, low), -1) * at[1]


def _key(name: str) -> str:
    return name.replace(".", "/")
