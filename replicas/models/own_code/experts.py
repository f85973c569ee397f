"""Experts whose result for a token does not depend on how many other tokens they see.

transformers' experts interface gives the tokens, the experts that the model's own router chose for
each of them, and their weights. The tokens of an expert are computed together, in the numbers of
tokens that the arithmetic knows; what a token's experts gave is added up in the order of its
choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear, pad
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from replicas.invariant import (
    TILE,
    VECTOR,
    Arithmetic,
    Product,
    RowFunction,
    aligned,
    in_tiles,
    same_counts,
)
from replicas.models.own_code.current_pass import PASS

EXPERTS = "lockstep_experts"
ON_DEVICE = "grouped_mm"
"""transformers' own, in one product for all experts: a GPU need not know who is hit."""

_PRODUCTS = "lockstep_products"


@dataclass(slots=True)
class ExpertProducts:
    """The products of one layer's experts, by expert."""

    up: list[Product]
    """Gate and up together, where there is a gate."""
    down: list[Product]
    prepack: bool
    arithmetic: Arithmetic | None = None
    """None: any number of tokens is computed as it is."""

    @classmethod
    def of(cls, module: Any, prepack: bool) -> ExpertProducts:
        """Of a module with transformers' experts interface."""

        def products(weights: torch.Tensor, biases: torch.Tensor | None) -> list[Product]:
            return [
                Product.of(_out_in(module, weight), None if biases is None else biases[at], prepack)
                for at, weight in enumerate(weights)
            ]

        up, down = (products(*given) for given in _weights(module))
        return cls(up, down, prepack)

    @property
    def all(self) -> list[Product]:
        return [*self.up, *self.down]

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """(in, out) of each weight."""
        return {(product.weight.shape[1], product.weight.shape[0]) for product in self.all}

    def use(self, arithmetic: Arithmetic) -> None:
        """Compute in this arithmetic of the model from now on. Most experts have one token or two
        in a step, fewer than a model's other functions may allow. So experts whose widths are whole
        vectors are also given the numbers of tokens that they allow themselves."""
        if arithmetic.proven and arithmetic.tokens[0] != TILE:
            widths = {width for shape in self.shapes for width in shape}
            if not any(width % VECTOR for width in widths):
                own = same_counts(self.shapes, self.prepack)
                tokens = tuple(sorted({*own, *arithmetic.tokens}))
                arithmetic = replace(arithmetic, tokens=tokens)
        self.arithmetic = arithmetic
        for product in self.all:
            product.tile = arithmetic.tile


def experts_of(model: nn.Module) -> list[Any]:
    """The modules that compute by transformers' experts interface."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def keep_products(module: nn.Module, products: ExpertProducts) -> None:
    """Let a module's experts compute by these."""
    setattr(module, _PRODUCTS, products)


def _weights(module: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Weights and biases, of all experts, of the first product and of the second."""
    first = "gate_up_proj" if module.has_gate else "up_proj"

    def both(name: str) -> tuple[Any, Any]:
        return getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None

    return both(first), both("down_proj")


def _out_in(module: Any, weight: torch.Tensor) -> torch.Tensor:
    return weight.t() if module.is_transposed else weight


def forward(
    module: Any,
    hidden_states: torch.Tensor,  # [tokens, hidden]
    top_k_index: torch.Tensor,  # [tokens, chosen], int64
    top_k_weights: torch.Tensor,  # [tokens, chosen]
) -> torch.Tensor:  # [tokens, hidden]
    """What the experts interface computes. Padding of a pass is sent to no expert."""
    tokens, chosen = top_k_index.shape
    current = PASS.get()
    real = tokens if current is None else current.tokens
    experts = top_k_index[:real].reshape(-1).numpy()
    order = np.argsort(experts, kind="stable")
    places = torch.from_numpy(order)
    states = hidden_states.index_select(0, places // chosen)
    starts = np.flatnonzero(np.diff(experts[order], prepend=-1))
    numbers = experts[order[starts]].tolist()
    counts = np.diff(starts, append=len(order)).tolist()
    sorted_out = _chosen_experts(module, states, numbers, counts)
    out = hidden_states.new_zeros((tokens * chosen, hidden_states.shape[1]))
    out.index_copy_(0, places, sorted_out)
    weighted = out.view(tokens, chosen, -1) * top_k_weights[:, :, None].to(out.dtype)
    total = weighted[:, 0]
    for choice in range(1, chosen):
        total = total + weighted[:, choice]
    return total.to(hidden_states.dtype)


def _chosen_experts(
    module: Any,
    states: torch.Tensor,  # [n, hidden], those of an expert together
    numbers: list[int],  # experts
    counts: list[int],  # states of each
) -> torch.Tensor:  # [n, hidden]
    """What stands between the products is computed of all experts' tokens at once."""
    products: ExpertProducts | None = getattr(module, _PRODUCTS, None)
    ups: Any
    downs: Any
    if products is None:
        ups, downs = (
            {each: _by_weight(module, *given, each) for each in numbers}
            for given in _weights(module)
        )
    else:
        ups, downs = products.up, products.down
    arithmetic = None if products is None else products.arithmetic
    padding = [arithmetic.padded(count) - count if arithmetic else 0 for count in counts]

    def computed(x: torch.Tensor, functions: Any) -> torch.Tensor:
        out = []
        for number, part, more in zip(numbers, torch.split(x, counts), padding, strict=True):
            function = functions[number]
            whole = pad(part, (0, 0, 0, more)) if more else aligned(part)
            out.append(function(whole)[: len(part)])
        return torch.cat(out)

    def rowwise(function: RowFunction, x: torch.Tensor) -> torch.Tensor:
        return in_tiles(function, TILE, x) if arithmetic else function(x)

    out = computed(rowwise(partial(_inner, module), computed(states, ups)), downs)
    return rowwise(module.post_expert_norm, out) if module.has_post_expert_norm else out


def _by_weight(
    module: Any, weights: torch.Tensor, biases: torch.Tensor | None, number: int
) -> RowFunction:
    bias = None if biases is None else biases[number]
    return partial(linear, weight=_out_in(module, weights[number]), bias=bias)


def _inner(module: Any, first: torch.Tensor) -> torch.Tensor:
    """What stands between the two products."""
    inner: torch.Tensor = module._apply_gate(first) if module.has_gate else module.act_fn(first)
    return inner


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, forward)
