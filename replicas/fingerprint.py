"""What of a replica decides its output: two replicas of one pool must have it in common."""

from __future__ import annotations

from hashlib import blake2b
from itertools import chain

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.models.load import dtype_name

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of so many bytes."""


def fingerprint(target: PreTrainedModel, config: ReplicaConfig) -> str:
    """A hash of the target's weights, the dtype and what else changes the bits of its logits.

    Of each weight the sum of its bits is taken, so that a large model costs one reading of it. The
    rates of its rotations are no weights, but come from the config that lies beside them.
    """
    digest = blake2b(digest_size=16)
    device = target.device.type
    digest.update(
        repr((dtype_name(config), config.deterministic, config.tensor_parallel, device)).encode()
    )
    for name, weight in chain(target.named_parameters(), target.named_buffers()):
        bits = weight.detach().contiguous().view(_BITS[weight.element_size()]).flatten()
        sums = (int(bits.sum(dtype=torch.int64)), int(bits[::7].sum(dtype=torch.int64)))
        digest.update(repr((name, tuple(weight.shape), sums)).encode())
    return digest.hexdigest()
