"""Reads a Clover-2 head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from replicas.drafters.checkpoints import load_tensors, read_config, tensor_names
from replicas.drafters.clover.head_config import CloverConfig, clover_config


@dataclass(frozen=True)
class CloverHead:
    """A head as loaded."""

    config: CloverConfig
    tensors: dict[str, torch.Tensor]
    """As `CloverConfig.tensors` names them."""


def read_clover(name: str, target: Any) -> CloverConfig:
    """Read the config of the head in a directory or on the hub, for a target of this config.

    Raises PairRefused, or OSError for a name not found.
    """
    return clover_config(read_config(name), tensor_names(name), target)


def load_clover(
    name: str, config: CloverConfig, dtype: torch.dtype, device: torch.device
) -> CloverHead:
    """Raises PairRefused with the tensors' names."""
    sizes = (config.vocab_size, config.vocab_size)
    return CloverHead(config, load_tensors(name, config.tensors, *sizes, dtype, device)[0])
