"""What a machine could do at best: bytes over its copy bandwidth, operations over its matrix rate.

Both rates are measured, not looked up. The work counted is the least that decoding can do: every
weight read once in a pass, the embedding's left out, each row's own KV positions, two operations
per weight and token. So a ceiling is never too low, and the share of it that is reached never too
high.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from transformers import PreTrainedModel

_WARM_UP_S = 0.5
"""Of a GPU, before it is timed."""
_LAUNCHES = 10
"""On a GPU, between two looks at the clock."""


@dataclass(frozen=True)
class Rates:
    """Measured on one device."""

    bytes_per_s: float
    """Of a large copy: bytes read and bytes written."""
    operations_per_s: float
    """Of a large square matrix product in the models' dtype."""


@dataclass(frozen=True)
class ModelWork:
    """What one model's passes that yield tokens cost."""

    weights: int
    """All but the embedding's rows."""
    itemsize: int
    """Bytes of a weight."""
    kv_bytes: int
    """Per position, keys and values of all layers."""
    attention_operations: int
    """Per query token and position, in all layers."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelWork:
        config = model.config
        embedding = model.get_input_embeddings().weight
        weights = sum(parameter.numel() for parameter in model.parameters())
        if model.get_output_embeddings().weight is not embedding:
            weights -= embedding.numel()  # a tied one is read whole, as the output
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        itemsize = model.dtype.itemsize
        return cls(
            weights=weights,
            itemsize=itemsize,
            kv_bytes=layers * 2 * kv_heads * dim * itemsize,
            attention_operations=layers * 4 * heads * dim,
        )

    def least_s(self, rates: Rates, passes: float, tokens: float, positions: float) -> float:
        """Of passes over `tokens` query tokens in all, which read `positions` KV positions in
        all: the longer of what their bytes and what their operations take."""
        moved = passes * self.weights * self.itemsize + positions * self.kv_bytes
        operations = 2 * tokens * self.weights + positions * self.attention_operations
        return max(moved / rates.bytes_per_s, operations / rates.operations_per_s)


@torch.inference_mode()
def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of several copies and products: a ceiling is what the machine can, not its mean."""
    on_gpu = device.type == "cuda"
    copied_bytes = 2**31 if on_gpu else 2**27
    copy_s = _copy_s(copied_bytes, device)
    side = 8192 if on_gpu else 256
    left = torch.randn(side, side, dtype=dtype, device=device)
    product = torch.empty_like(left)
    product_s = _best_s(lambda: torch.mm(left, left, out=product), device)
    return Rates(2 * copied_bytes / copy_s, 2 * side**3 / product_s)


def _copy_s(size: int, device: torch.device) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return _best_s(lambda: copy.copy_(source), device)


def _best_s(run: Callable[[], object], device: torch.device, tries: int = 8) -> float:
    """Of one run. A GPU at rest takes a while to raise its clocks, and one launch alone would be
    timed with the way to the GPU and back."""
    on_gpu = device.type == "cuda"
    launches = _LAUNCHES if on_gpu else 1

    def seconds() -> float:
        start = perf_counter()
        for _ in range(launches):
            run()
        if on_gpu:
            torch.cuda.synchronize(device)
        return (perf_counter() - start) / launches

    warm_s = perf_counter() + (_WARM_UP_S if on_gpu else 0.0)
    seconds()  # the first one allocates and chooses kernels, wherever it runs
    while perf_counter() < warm_s:
        seconds()
    return min(seconds() for _ in range(tries))
