"""Small tensors on their way to a device."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch

_NUMPY: dict[torch.dtype, Any] = {
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.bool: np.bool_,
}


def on_host(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """These numbers, or lines of as many, in memory that the device reads by itself: pinned, if it
    is a GPU."""
    if device.type == "cpu" and dtype is torch.int64 and values and isinstance(values[0], list):
        # For so few numbers numpy's own way takes twice as long.
        flat = array("q")
        for line in values:
            flat.extend(line)
        return torch.from_numpy(np.frombuffer(flat, np.int64).reshape(len(values), -1))
    if device.type == "cpu" and dtype in _NUMPY:
        return torch.from_numpy(np.array(values, _NUMPY[dtype]))  # less than half the time
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor of these numbers on the device.

    A GPU fetches them when it gets there, and the host does not wait; from memory that is not
    pinned it would. The allocator keeps pinned memory until it has been read.
    """
    made = on_host(values, dtype, device)
    return made if device.type == "cpu" else made.to(device, non_blocking=True)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host, on the device, itself on a CPU; as with `upload` the host does not
    wait."""
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
