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
from replicas.training.head import TrainableHead
from replicas.training.new_head import frequent_tokens, head_settings, new_config, new_tensors

_IDS, _EMBEDDINGS = "ids", "embeddings"


@dataclass(frozen=True)
class Start:
    """A new head of a target."""

    settings: dict[str, Any]
    """`config.json`, in the speculators format."""
    tensors: dict[str, torch.Tensor]
    ids: torch.Tensor  # [draft vocabulary], int64
    embeddings: torch.Tensor  # [target's vocabulary, width]
    coverage: float
    """Share of the answers' tokens that the head can draft."""

    @classmethod
    def of(
        cls,
        target: PreTrainedModel,
        draft_vocab: int,
        intermediate_size: int,
        conversations: Iterable[Conversation],
        features: FeatureFolder,
        items: Sequence[Item],
        seed: int,
    ) -> Start:
        """Raises TrainingRefused."""
        settings = head_settings(target.config, draft_vocab, intermediate_size)
        config = new_config(settings, target.config)
        ids, coverage = frequent_tokens(conversations, draft_vocab, config.target_vocab)
        states = features.read(items[0].part, items[0].index).hidden.float()
        # The first tokens' states are far from all others' in many models.
        states = states[len(states) // 2 :, -config.target_width :]
        typical = float(states.square().mean().sqrt().clamp(min=1e-6))
        tensors = new_tensors(config, target, ids, typical, seed)
        embeddings = target.get_input_embeddings().weight.detach().float().cpu()
        return cls(settings, tensors, ids, embeddings, coverage)

    def head(self, target: Any) -> TrainableHead:
        """`target`: transformers' config."""
        config = new_config(self.settings, target)
        return TrainableHead(config, self.tensors, self.ids, self.embeddings)

    def write(self, path: Path) -> None:
        whole = {**self.tensors, _IDS: self.ids, _EMBEDDINGS: self.embeddings}
        part = path.with_suffix(".part")
        said = {"settings": json.dumps(self.settings), "coverage": repr(self.coverage)}
        save_file({name: each.contiguous() for name, each in whole.items()}, part, metadata=said)
        part.rename(path)

    @classmethod
    def read(cls, path: Path) -> Start:
        with safe_open(path, "pt") as opened:
            said = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        ids, embeddings = tensors.pop(_IDS), tensors.pop(_EMBEDDINGS)
        settings, coverage = json.loads(said["settings"]), float(said["coverage"])
        return cls(settings, tensors, ids, embeddings, coverage)


def native_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster than in float32 there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
