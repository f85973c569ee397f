"""What a machine could do at best: bytes over its copy bandwidth, operations over its matrix rate.

Both rates are measured, not looked up. The work counted is the least that a forward pass can do:
every weight but the embedding read once, each row's own KV positions, two operations per weight and
token. So a ceiling is never too low, and the share of it that is reached never too high.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Rates:
    """Measured on one device."""

    bytes_per_s: float
    """Of a large copy: bytes read and bytes written."""
    operations_per_s: float
    """Of a large square matrix product in the models' dtype."""


@dataclass(frozen=True)
class Work:
    """What was computed, at least."""

    bytes: float
    operations: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def bandwidth_s(self, rates: Rates) -> float:
        return self.bytes / rates.bytes_per_s

    def matrix_s(self, rates: Rates) -> float:
        return self.operations / rates.operations_per_s


@dataclass(frozen=True)
class ModelWork:
    """What one model's forward passes cost."""

    weight_bytes: int
    """Read by every pass: all weights but the embedding's rows."""
    weights: int
    output_weights: int
    """Of them in the output matrix, which a prefill does not need."""
    kv_bytes: int
    """Per position, keys and values of all layers."""
    attention_operations: int
    """Per query token and position."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelWork:
        config = model.config
        embedding = model.get_input_embeddings().weight
        output = model.get_output_embeddings().weight
        weights = sum(parameter.numel() for parameter in model.parameters())
        if output is not embedding:  # a tied one is read whole, as the output
            weights -= embedding.numel()
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        itemsize = model.dtype.itemsize
        return cls(
            weight_bytes=weights * itemsize,
            weights=weights,
            output_weights=output.numel(),
            kv_bytes=layers * 2 * kv_heads * dim * itemsize,
            attention_operations=layers * 4 * heads * dim,
        )

    def decode(self, passes: float, tokens: float, positions: float) -> Work:
        """Passes over `tokens` query tokens in all, which read `positions` KV positions in all."""
        return Work(
            bytes=passes * self.weight_bytes + positions * self.kv_bytes,
            operations=2 * tokens * self.weights + positions * self.attention_operations,
        )

    def prefill(self, lengths: list[int]) -> Work:
        """Prompts of these lengths; a token attends to half of its prompt on average."""
        tokens = sum(lengths)
        pairs = sum(length * length / 2 for length in lengths)
        return Work(
            bytes=float(self.weight_bytes + tokens * self.kv_bytes),
            operations=2.0 * tokens * (self.weights - self.output_weights)
            + pairs * self.attention_operations,
        )


@torch.inference_mode()
def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of several copies and products: a ceiling is what the machine can, not its mean."""
    on_gpu = device.type == "cuda"
    copied_bytes = 2**31 if on_gpu else 2**27
    copy_s = _copy_s(copied_bytes, device)
    side = 8192 if on_gpu else 1024
    left = torch.randn(side, side, dtype=dtype, device=device)
    product = torch.empty_like(left)
    product_s = _best_s(lambda: torch.mm(left, left, out=product), device)
    return Rates(2 * copied_bytes / copy_s, 2 * side**3 / product_s)


def _copy_s(size: int, device: torch.device) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return _best_s(lambda: copy.copy_(source), device)


def _best_s(run: Callable[[], object], device: torch.device, tries: int = 8) -> float:
    seconds = []
    for _ in range(tries):
        start = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - start)
    return min(seconds[1:])  # the first one warms up
