"""Small tensors on their way to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_NUMPY: dict[torch.dtype, Any] = {
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bool: np.bool_,
}


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor of these numbers on the device.

    A GPU fetches them when it gets there, and the host does not wait; from memory that is not
    pinned it would. The allocator keeps pinned memory until it has been read.
    """
    if device.type == "cpu" and dtype in _NUMPY:
        return torch.from_numpy(np.array(values, _NUMPY[dtype]))  # half of torch's time
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host, on the device, itself on a CPU; as with `upload` the host does not
    wait."""
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
