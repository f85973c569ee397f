"""What the trainer asks of a kind of head. Data, features, the loop and the report are the same for
all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from replicas.training.methods.head import TrainableHead


@dataclass(frozen=True)
class Weights:
    """What a new head begins with."""

    tensors: dict[str, torch.Tensor]
    """They learn."""
    frozen: dict[str, torch.Tensor]
    """The target's own: for the checkpoint where it names them, else for the training alone."""


class Method(Protocol):
    """One kind of head."""

    name: str
    """Of `--method`, and of the drafter that serves it."""
    title: str
    """With its article."""
    unroll: int
    """Draft tokens that it learns together."""
    step_weight: float
    """What a draft token counts, of the one before."""
    speculators: bool
    """Whether its checkpoint has a format of the speculators library."""

    def aux_layers(self, layers: int) -> tuple[int, ...]:
        """The hidden states that it sees of a target with so many layers, as transformers numbers
        them; the last number means those before the last norm."""

    def settings(self, target: Any, draft_vocab: int, intermediate_size: int) -> dict[str, Any]:
        """`config.json` of a new head. `target`: transformers' config. Raises TrainingRefused."""

    def new(
        self,
        settings: dict[str, Any],
        target: PreTrainedModel,
        ids: torch.Tensor,  # [draft vocabulary], int64: the target's ids, rising
        typical: float,
        seed: int,
    ) -> Weights:
        """`typical`: the root mean square of the last of the head's hidden states. Raises
        TrainingRefused."""

    def head(
        self, settings: dict[str, Any], target: Any, weights: Weights, ids: torch.Tensor
    ) -> TrainableHead: ...
