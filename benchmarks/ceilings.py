"""What a machine could do at best: bytes over its copy bandwidth, operations over its matrix rate.

Both rates are measured, not looked up. The work counted is the least that a forward pass can do:
every weight that it needs read once, the embedding's left out, each row's own KV positions, two
operations per weight and token. Filling in prompts takes neither the output matrix nor what the
last layer does beyond its keys and values. So a ceiling is never too low, and the share of it that
is reached never too high.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn
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

    weights: int
    """All but the embedding's rows: a pass that yields tokens reads them."""
    prefill_weights: int
    """Of them those that keys and values depend on: neither the output matrix nor, in the last
    layer, anything but the two projections."""
    itemsize: int
    """Bytes of a weight."""
    layers: int
    kv_bytes: int
    """Per position, keys and values of all layers."""
    attention_operations: int
    """Per query token and position, in all layers."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelWork:
        config = model.config
        embedding = model.get_input_embeddings().weight
        output = model.get_output_embeddings().weight
        weights = _count(model)
        if output is not embedding:  # a tied one is read whole, as the output
            weights -= embedding.numel()
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        projections = config.hidden_size * 2 * kv_heads * dim
        itemsize = model.dtype.itemsize
        return cls(
            weights=weights,
            prefill_weights=weights
            - output.numel()
            - _count(model.base_model.layers[-1])
            + projections,
            itemsize=itemsize,
            layers=layers,
            kv_bytes=layers * 2 * kv_heads * dim * itemsize,
            attention_operations=layers * 4 * heads * dim,
        )

    @property
    def weight_bytes(self) -> int:
        """Read by every pass that yields tokens."""
        return self.weights * self.itemsize

    def decode(self, passes: float, tokens: float, positions: float) -> Work:
        """Passes over `tokens` query tokens in all, which read `positions` KV positions in all."""
        return Work(
            bytes=passes * self.weight_bytes + positions * self.kv_bytes,
            operations=2 * tokens * self.weights + positions * self.attention_operations,
        )

    def prefill(self, lengths: Sequence[int], outputs: bool = False) -> Work:
        """One pass that fills the KV cache with prompts of these lengths; a token attends to half
        of its prompt on average, in all layers but the last.

        With `outputs` the last token of each prompt goes on to the logits, so the other weights are
        read, too, and used for these tokens alone.
        """
        tokens = sum(lengths)
        pairs = sum(length * length / 2 for length in lengths)
        attention = self.attention_operations / self.layers
        weights = self.weights if outputs else self.prefill_weights
        work = Work(
            bytes=float(weights * self.itemsize + tokens * self.kv_bytes),
            operations=2.0 * tokens * self.prefill_weights + pairs * attention * (self.layers - 1),
        )
        if outputs:
            further = 2.0 * len(lengths) * (self.weights - self.prefill_weights)
            work += Work(0.0, further + tokens * attention)
        return work

    def generate(self, prompts: Sequence[int], new_tokens: int) -> Work:
        """One batch of prompts of these lengths and so many new tokens each, from the first pass to
        the last: that over the prompts yields the first tokens. Padding is left out."""
        passes = new_tokens - 1
        positions = sum(length + n for length in prompts for n in range(1, new_tokens))
        first = self.prefill(prompts, outputs=True)
        return first + self.decode(passes, passes * len(prompts), positions)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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
