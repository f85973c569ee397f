"""Reads a one-pass head of any format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from replicas.drafters.checkpoints import load_tensors, read_config, tensor_names
from replicas.drafters.one_pass.head_config import OnePassConfig, one_pass_config


@dataclass(frozen=True)
class OnePassHead:
    """A head as loaded."""

    config: OnePassConfig
    tensors: dict[str, torch.Tensor]
    """As `OnePassConfig.tensors` names them."""
    ids: torch.Tensor | None  # [vocab of the head], int64: the target's; None: the same


def read_one_pass(name: str, target: Any) -> OnePassConfig:
    """Read the config of the head in a directory or on the hub, for a target of this config.

    Raises PairRefused, or OSError for a name not found.
    """
    return one_pass_config(read_config(name), tensor_names(name), target)


def load_one_pass(
    name: str, config: OnePassConfig, dtype: torch.dtype, device: torch.device
) -> OnePassHead:
    """Raises PairRefused with the tensors' names."""
    sizes = (config.vocab_size, config.target_vocab)
    return OnePassHead(config, *load_tensors(name, config.tensors, *sizes, dtype, device))
