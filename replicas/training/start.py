"""What a training begins with, in one file: so that workers, and a run that goes on, need neither
the target nor a second count of its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from replicas.training.batches import Item
from replicas.training.conversations import Conversation
from replicas.training.features import FeatureFolder
from replicas.training.methods import METHODS, Method, TrainableHead, Weights, frequent_tokens

_IDS, _FROZEN = "ids", "frozen."


@dataclass(frozen=True)
class Start:
    """A new head of a target."""

    method: str
    settings: dict[str, Any]
    """`config.json` of its checkpoint."""
    weights: Weights
    ids: torch.Tensor  # [draft vocabulary], int64
    coverage: float
    """Share of the answers' tokens that the head can draft."""

    @classmethod
    def of(
        cls,
        method: Method,
        target: PreTrainedModel,
        draft_vocab: int,
        intermediate_size: int,
        conversations: Iterable[Conversation],
        features: FeatureFolder,
        items: Sequence[Item],
        seed: int,
    ) -> Start:
        """Raises TrainingRefused."""
        settings = method.settings(target.config, draft_vocab, intermediate_size)
        ids, coverage = frequent_tokens(conversations, draft_vocab, int(target.config.vocab_size))
        states = features.read(items[0].part, items[0].index).hidden.float()
        # The first tokens' states are far from all others' in many models.
        states = states[len(states) // 2 :, -int(target.config.hidden_size) :]
        typical = float(states.square().mean().sqrt().clamp(min=1e-6))
        return cls(
            method.name, settings, method.new(settings, target, ids, typical, seed), ids, coverage
        )

    def head(self, target: Any) -> TrainableHead:
        """`target`: transformers' config."""
        return METHODS[self.method].head(self.settings, target, self.weights, self.ids)

    def write(self, path: Path) -> None:
        """The file is there whole or not at all. Raises OSError."""
        frozen = {_FROZEN + name: value for name, value in self.weights.frozen.items()}
        whole = {**self.weights.tensors, **frozen, _IDS: self.ids}
        part = path.with_suffix(".part")
        said = {
            "method": self.method,
            "settings": json.dumps(self.settings),
            "coverage": repr(self.coverage),
        }
        save_file({name: each.contiguous() for name, each in whole.items()}, part, metadata=said)
        part.rename(path)

    @classmethod
    def read(cls, path: Path) -> Start:
        """A file of `write`. Raises OSError, and SafetensorError for another file."""
        with safe_open(path, "pt") as opened:
            said = opened.metadata()
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        ids = found.pop(_IDS)
        frozen = {
            name.removeprefix(_FROZEN): value
            for name, value in found.items()
            if name.startswith(_FROZEN)
        }
        tensors = {name: each for name, each in found.items() if not name.startswith(_FROZEN)}
        settings, coverage = json.loads(said["settings"]), float(said["coverage"])
        return cls(said["method"], settings, Weights(tensors, frozen), ids, coverage)


def native_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster than in float32 there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
