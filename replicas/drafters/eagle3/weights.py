"""Reads a head of either format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from replicas.drafters.checkpoints import load_tensors, read_config, tensor_names
from replicas.drafters.eagle3.head_config import LAYER, HeadConfig, head_config
from replicas.drafters.eagle3.planted_head import PLANTED_HEAD, planted_head, planted_tensors
from replicas.names import map_shift


@dataclass(frozen=True)
class Head:
    """A head as loaded."""

    config: HeadConfig
    tensors: dict[str, torch.Tensor]
    """As `HeadConfig.tensors` names them."""
    ids: torch.Tensor | None  # [vocab of the head], int64: the target's; None: the same
    shift: int | None = None
    """Of a planted head: it proposes the token before plus so many ids."""


def read_head(name: str, target: Any) -> HeadConfig:
    """Read the config of the head in a directory or on the hub, for a target of this config.

    Raises PairRefused, or OSError for a name not found.
    """
    if name == PLANTED_HEAD:
        return planted_head(target)
    return head_config(read_config(name), tensor_names(name), target)


def load_head(name: str, config: HeadConfig, dtype: torch.dtype, device: torch.device) -> Head:
    """Raises PairRefused with the tensors' names."""
    if name == PLANTED_HEAD:
        tensors = planted_tensors(config, dtype, device)
        return Head(config, tensors, None, map_shift(config.target_vocab))
    sizes = (config.vocab_size, config.target_vocab)
    renamed = {"midlayer.": LAYER}
    tensors, ids = load_tensors(name, config.tensors, *sizes, dtype, device, renamed)
    return Head(config, tensors, ids)
