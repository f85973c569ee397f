"""What of a replica decides its output: two replicas of one pool must have it in common."""

from __future__ import annotations

from hashlib import blake2b
from itertools import chain

import torch

from replicas.config import ReplicaConfig
from replicas.models import PagedModel, dtype_name, trial_logits


def fingerprint(target: PagedModel, config: ReplicaConfig) -> str:
    """A hash of the target's weights, the dtype and what else changes the bits of its logits.

    Of each weight the sum of its bits is taken, so that a large model costs one reading of it; in
    words of eight bytes, for of narrower ones torch would make a copy in 64 bits. The rates of its
    rotations are no weights, but come from the config that lies beside them. Where a token's bits
    depend on its row alone, those of a few tokens are in it, too: they tell how the layers compute,
    and on which processor and library.
    """
    digest = blake2b(digest_size=16)
    model, arithmetic, joined = target.model, target.arithmetic, target.decoder is not None
    computed = (dtype_name(config), config.deterministic, config.tensor_parallel)
    way = (model.device.type, target.backend.name, joined, arithmetic)
    digest.update(repr((*computed, *way)).encode())
    for name, weight in chain(model.named_parameters(), model.named_buffers()):
        bits = _bytes(weight)
        whole = bits[: len(bits) // 8 * 8].view(torch.int64)
        sums = tuple(int(part.sum()) for part in (whole, whole[::7], bits[8 * len(whole) :]))
        digest.update(repr((name, tuple(weight.shape), sums)).encode())
    if arithmetic.proven:
        digest.update(_bytes(trial_logits(target)).cpu().numpy().tobytes())
    return digest.hexdigest()


def _bytes(x: torch.Tensor) -> torch.Tensor:  # [bytes], uint8
    flat = x.detach().contiguous().flatten().view(torch.uint8)
    return flat.clone() if flat.storage_offset() % 8 else flat
