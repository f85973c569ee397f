"""Small tensors on their way to a device."""

from __future__ import annotations

from typing import Any

import torch


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor of these numbers on the device; as with `send` the host does not wait."""
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host, on the device, itself on a CPU.

    A GPU fetches it when it gets there, and the host does not wait; from memory that is not pinned
    it would. The allocator keeps pinned memory until it has been read.
    """
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
