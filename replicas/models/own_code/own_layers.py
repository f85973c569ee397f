"""Lets the layers of a model's own code compute in one arithmetic, on a CPU in float32.

Linear layers, experts and whatever else multiplies tokens with a weight compute by `Product`: in
tiles, in numbers of tokens for which every row has the same bits. The model's code stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from replicas.invariant import Arithmetic, Product, RowFunction
from replicas.models.own_code.experts import ExpertProducts, experts_of, keep_products


class OwnProducts:
    """The products of a model's own layers; made once, they take the layers over."""

    def __init__(self, model: PreTrainedModel, prepack: bool) -> None:
        self._linear: list[Product] = []
        self._experts: list[ExpertProducts] = []
        self._counted = _Counted()
        self.rowwise: list[tuple[RowFunction, int]] = []
        """What else a layer computes of each token, and the width of its input."""
        self.whole_vectors = False
        """Whether some functions of tokens are not among them."""
        experts = experts_of(model)
        inside = {id(part) for module in experts for part in module.modules()}
        for module in experts:
            products = ExpertProducts.of(module, prepack)
            keep_products(module, products)
            self._experts.append(products)
            self.whole_vectors = True
        parts = [module for module in model.modules() if id(module) not in inside]
        for module in parts:
            if type(module) is nn.Linear:
                product = Product.of(module.weight, module.bias, prepack)
                self._linear.append(product)
                module.forward = _forward_of(product)  # type: ignore[method-assign, assignment]
            elif not isinstance(module, nn.Embedding):
                self._take(module, prepack)
        self._measure(model, parts)

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """(in, out) of each weight."""
        products = (*self._linear, *self._counted.products.values())
        own = {(product.weight.shape[1], product.weight.shape[0]) for product in products}
        return own.union(*(experts.shapes for experts in self._experts))

    def use(self, arithmetic: Arithmetic) -> None:
        """Compute in this arithmetic from now on."""
        for product in (*self._linear, *self._counted.products.values()):
            product.tile = arithmetic.tile
        self._counted.arithmetic = arithmetic
        for experts in self._experts:
            experts.use(arithmetic)

    def _take(self, module: nn.Module, prepack: bool) -> None:
        """A module of another make that holds matrices: what it multiplies with them is computed by
        products, too."""
        matrices = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
        for weight in matrices:
            for matrix in weight if weight.dim() == 3 else [weight]:
                given = matrix.t() if isinstance(module, Conv1D) else matrix
                self._counted.products[_key(given)] = Product.of(given, None, prepack)
        if matrices:
            # Not that of products over the same model, which these take the place of.
            plain = MethodType(type(module).forward, module)
            module.forward = self._counted.within(plain)

    def _measure(self, model: PreTrainedModel, parts: list[nn.Module]) -> None:
        """One norm, activation and rotary table of each kind, and the width of its input."""
        functions: dict[tuple[type, int], RowFunction] = {}
        inner = {layer.in_features for layer in parts if type(layer) is nn.Linear}
        for module in parts:
            if isinstance(module, nn.Linear | nn.Embedding) or any(module.children()):
                continue
            if "RotaryEmbedding" in type(module).__name__:
                if "layer_type" in inspect.signature(module.forward).parameters:
                    self.whole_vectors = True
                else:
                    functions[type(module), 1] = _table_of(module)
                continue
            weight = getattr(module, "weight", None)
            arguments = inspect.signature(module.forward).parameters.values()
            needed = [argument for argument in arguments if argument.default is argument.empty]
            if len(needed) != 1 or (weight is not None and weight.dim() > 1):
                self.whole_vectors = True
                continue
            own = weight.shape if weight is not None else getattr(module, "normalized_shape", None)
            for width in inner if own is None else {own[-1]}:
                functions[type(module), width] = module
        self.rowwise = [(function, width) for (_, width), function in functions.items()]


def _key(weight: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return weight.data_ptr(), tuple(weight.shape), weight.stride()


class _Counted(TorchFunctionMode):
    """Within some modules: products with their matrices have the bits of one arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[Any, Product] = {}
        self.arithmetic: Arithmetic | None = None

    def within(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self:
                return plain(*args, **kwargs)

        return forward

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is linear and len(args) >= 2:
            product = self._product(args[1], args[0])
            if product is not None:
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                return self._multiplied(args[0], product, bias)
        if func is torch.addmm and len(args) == 3 and not kwargs:
            product = self._product(args[2].t(), args[1])
            if product is not None:
                return self._multiplied(args[1], product, args[0])
        return func(*args, **kwargs)

    def _product(self, weight: torch.Tensor, x: torch.Tensor) -> Product | None:
        if x.dtype is not torch.float32 or x.is_meta:
            return None
        return self.products.get(_key(weight))

    def _multiplied(
        self, x: torch.Tensor, product: Product, bias: torch.Tensor | None
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        count = flat.shape[0]
        more = 0 if self.arithmetic is None else self.arithmetic.padded(count) - count
        out = product(pad(flat, (0, 0, 0, more)) if more else flat)[:count]
        out = out if bias is None else out + bias
        return out.view(*x.shape[:-1], -1)


def _forward_of(product: Product) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:  # [..., in] -> [..., out]
        if x.is_meta:  # the layers are only read
            return x.new_empty((*x.shape[:-1], product.weight.shape[0]))
        return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return forward


def _table_of(rotary: nn.Module) -> RowFunction:
    def table(x: torch.Tensor) -> torch.Tensor:  # [tokens, 1] -> [tokens, 2 * rotated]
        positions = torch.arange(1000)[-x.shape[0] :]
        tables = rotary(x, positions[None])
        tables = [tables] if isinstance(tables, torch.Tensor) else tables
        real = [torch.view_as_real(table) if table.is_complex() else table for table in tables]
        return torch.cat([table.reshape(x.shape[0], -1) for table in real], -1)

    return table
