"""The forward pass of Llama-like decoders with fewer and larger operations.

transformers' own forward spends most of its time, at the sizes of a draft, on the number of its
operations. This one computes the same with a third of them: query, key and value come out of one
product, gate and up out of another, keys and values go into the cache as they lie, the rotation is
looked up in a table and done in place.

It is built from the modules of the loaded model (one of `MAKES`) and holds their own weights:
joined ones take the place of the parts, which become views.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, rms_norm, silu
from transformers import (
    Glm4ForCausalLM,
    GlmForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.activations import SiLUActivation

from replicas.invariant import TILE, Product, RowFunction
from replicas.kv_cache import PagedCache


class LayerAttention(Protocol):
    """The attention of one pass."""

    def __call__(
        self,
        layer: int,
        queries: torch.Tensor,  # [tokens, vectors, head_dim], the heads first
        scaling: float,
        sinks: torch.Tensor | None = None,  # [heads]
        /,
    ) -> torch.Tensor:  # [tokens, heads * value_dim]
        """The layer's result; its keys and values are in the cache already."""
        ...


MAKES: tuple[type[PreTrainedModel], ...] = (
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    GlmForCausalLM,
    Glm4ForCausalLM,
)
"""Models that were read and are tested. Others, subclasses too, have the same parts and may do more
with them where a trial does not see it: scale queries by their position from some length on."""

_OTHER_ROTATION = (GlmForCausalLM, Glm4ForCausalLM)
"""Neighbours against each other, in a part of a head."""

_SILU = (nn.SiLU, SiLUActivation)
"""Called as functions: a module's own call takes longer than what it computes."""


class NotJoined(Exception):
    """The model keeps its own layers; the message says why."""


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: torch.Tensor  # [width]
    eps: float
    floor: torch.Tensor  # [1, 1], epsilon

    @classmethod
    def of(cls, weight: torch.Tensor, eps: float) -> _Norm:
        return cls(weight, eps, weight.new_full((1, 1), eps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda or x.dtype != torch.float32:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        # Fewer operations than rms_norm takes on a CPU, and as little dependent on other rows.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.floor, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: _Norm
    qkv: Product  # (heads + 2 * kv_heads) * head_dim of hidden
    head_norm: tuple[torch.Tensor, float] | None  # [heads + kv_heads, head_dim], epsilon
    out: Product
    after_attention: RowFunction  # a norm, or nothing
    before_mlp: _Norm
    gate_up: Product  # 2 * intermediate of hidden
    activation: RowFunction
    down: Product
    after_mlp: RowFunction  # likewise

    def activated(
        self, gate_up: torch.Tensor
    ) -> torch.Tensor:  # [tokens, 2 * inner] -> [.., inner]
        gate, up = gate_up.chunk(2, -1)
        return self.activation(gate).mul_(up)


_Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of each token."""
_ROWS_MOST = 4 * TILE


class JoinedDecoder:
    """The decoder of a model over its paged cache."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, prepack: bool) -> None:
        """Takes the model's weights over; raises NotJoined, and then has changed nothing. `prepack`
        is that of `Product.of`."""
        if type(model) not in MAKES:
            raise NotJoined(f"{type(model).__name__} is of another make")
        if any("forward" in vars(module) for module in model.modules()):
            raise NotJoined("a rank holds a part of each")
        if any(type(weight.data) is not torch.Tensor for weight in model.parameters()):
            raise NotJoined("its weights are no plain ones")
        body: Any = model.model
        first = body.layers[0].self_attn
        self._cache = cache
        self._dim = int(first.head_dim)
        self._kv_heads = first.k_proj.weight.shape[0] // self._dim
        self._heads = first.q_proj.weight.shape[0] // self._dim
        self._scaling = float(first.scaling)
        self._embedding = body.embed_tokens.weight
        self._norm = _norm(body.norm)
        self._prepack = prepack
        self._head = self._product(model.lm_head)
        positions = torch.arange(cache.shape.context_len, device=self._embedding.device)
        cos, sin = body.rotary_emb(self._embedding, positions[None])
        self._cos, self._sin = cos[0], sin[0]  # [context_len, rotated]
        self._rotate = sys.modules[type(first).__module__].apply_rotary_pos_emb
        # The two halves of a whole head against each other.
        self._half_rotation = cos.shape[-1] == self._dim and type(model) not in _OTHER_ROTATION
        self._other_half = torch.tensor([1, 0], device=self._embedding.device)
        # cos, and sin with the sign that its half gets: one look-up per pass.
        signed = torch.cat((-self._sin[:, : self._dim // 2], self._sin[:, self._dim // 2 :]), -1)
        self._table = torch.stack((self._cos, signed), dim=1)  # [context_len, 2, rotated]
        self._layers = [self._joined(layer) for layer in body.layers]
        self.kernels: Any = None
        """`replicas.kernels.layers` on a GPU; None: torch's operations run."""
        if self._half_rotation and self._embedding.is_cuda:
            from replicas.kernels import layers

            self.kernels = layers

    @property
    def products(self) -> list[Product]:
        of_layers = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in self._layers]
        return [self._head, *(product for layer in of_layers for product in layer)]

    @property
    def rowwise(self) -> list[tuple[RowFunction, int]]:
        """What else a layer computes of each token, and the width of its input."""
        layer = self._layers[0]
        # Positions differ from token to token, as they do in a pass.
        every = torch.arange(len(self._cos)).repeat(1 + _ROWS_MOST // len(self._cos))

        def rotated(qkv: torch.Tensor) -> torch.Tensor:
            qkv = qkv.view(qkv.shape[0], self.stride, self._dim)
            self._rotated(layer, qkv, self._rotation(every[-qkv.shape[0] :]))
            return qkv.flatten(1)

        width = layer.gate_up.weight.shape[0]
        return [
            (layer.before_mlp, self._embedding.shape[1]),
            (layer.activated, width),
            (rotated, self.stride * self._dim),
        ]

    @property
    def stride(self) -> int:
        """Vectors per token that attention is given: queries, keys and values."""
        stride: int = self._heads + 2 * self._kv_heads
        return stride

    def forward(
        self,
        tokens: torch.Tensor,  # [tokens], int64
        positions: torch.Tensor,  # [tokens], int64
        slots: Any,  # [tokens], int64, of the cache's kind
        attention: LayerAttention,
        aux_layers: tuple[int, ...] = (),
        kv_only: bool = False,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:  # [tokens, hidden], each the same
        """The last hidden states, and those after the `aux_layers` (0: the embedding).

        With `kv_only` the last layer ends where its keys and values are written; then the first
        result means nothing.
        """
        x = embedding(tokens, self._embedding)
        aux_hidden_states = [x.clone()] if 0 in aux_layers else []
        kernels = self.kernels
        rotation = None if kernels else self._rotation(positions)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.before_attention(x)).view(x.shape[0], self.stride, self._dim)
            if kernels:
                kernels.rotate_and_write(
                    *(qkv, self._cache, index, self._cache.own(index, slots)),
                    *(positions, self._table, layer.head_norm),
                )
            else:
                assert rotation is not None
                self._rotated(layer, qkv, rotation)
                fresh = qkv[:, self._heads :].view(-1, 2, self._kv_heads, self._dim)
                self._cache.write(index, slots, fresh)
            if kv_only and index == last and index + 1 not in aux_layers:
                break
            x = layer.after_attention(layer.out(attention(index, qkv, self._scaling))).add_(x)
            inner = layer.gate_up(layer.before_mlp(x))
            if kernels and layer.activation is silu:
                inner = kernels.silu_times(inner)
            else:
                inner = layer.activated(inner)
            x = layer.after_mlp(layer.down(inner)).add_(x)
            if index + 1 in aux_layers:
                aux_hidden_states.append(x.clone())
        return x, aux_hidden_states

    def logits(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, hidden] -> [tokens, vocab]
        return self._head(self._norm(x))

    def _rotation(self, positions: torch.Tensor) -> _Rotation:
        if not self._half_rotation:
            return self._cos[positions], self._sin[positions]
        cos, sin = self._table.index_select(0, positions)[:, :, None].unbind(1)
        return cos, sin.view(-1, 1, 2, self._dim // 2)

    def _rotated(
        self,
        layer: _Layer,
        qkv: torch.Tensor,  # [tokens, heads + 2 * kv_heads, head_dim]
        rotation: _Rotation,
    ) -> None:
        """Rotate queries and keys, in place."""
        cos, sin = rotation
        heads, turned = self._heads, self._heads + self._kv_heads
        both = qkv[:, :turned]  # the heads that are rotated: queries, then keys
        if layer.head_norm is not None:
            weight, eps = layer.head_norm
            both.copy_(rms_norm(both, (self._dim,), None, eps)).mul_(weight)
        if self._half_rotation:
            halves = both.view(-1, turned, 2, self._dim // 2)
            swapped = halves.index_select(2, self._other_half)
            both.mul_(cos)
            halves.addcmul_(swapped, sin)
            return
        query, key = self._rotate(
            both[None, :, :heads].transpose(1, 2),
            both[None, :, heads:].transpose(1, 2),
            cos[None],
            sin[None],
        )
        both[:, :heads] = query[0].transpose(0, 1)
        both[:, heads:] = key[0].transpose(0, 1)

    def _joined(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = Product.of(
            *_join((attention.q_proj, attention.k_proj, attention.v_proj)), self._prepack
        )
        if hasattr(mlp, "gate_up_proj"):
            gate_up, activation = self._product(mlp.gate_up_proj), mlp.activation_fn
        else:
            gate_up = Product.of(*_join((mlp.gate_proj, mlp.up_proj)), self._prepack)
            activation = mlp.act_fn
        head_norm = None
        if hasattr(attention, "q_norm"):
            query, key = _norm(attention.q_norm), _norm(attention.k_norm)
            parts = (
                query.weight.expand(self._heads, -1),
                key.weight.expand(self._kv_heads, -1),
            )
            head_norm = (torch.cat(parts), query.eps)
        return _Layer(
            before_attention=_norm(layer.input_layernorm),
            qkv=qkv,
            head_norm=head_norm,
            out=self._product(attention.o_proj),
            after_attention=_norm_if_any(layer, "post_self_attn_layernorm"),
            before_mlp=_norm(layer.post_attention_layernorm),
            gate_up=gate_up,
            activation=silu if isinstance(activation, _SILU) else activation,
            down=self._product(mlp.down_proj),
            after_mlp=_norm_if_any(layer, "post_mlp_layernorm"),
        )

    def _product(self, layer: nn.Linear) -> Product:
        return Product.of(layer.weight, layer.bias, self._prepack)


def _join(parts: Iterable[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and bias for layers of the same input; theirs become views, so none is doubled."""
    parts = tuple(parts)
    joined: list[torch.Tensor | None] = []
    for name in ("weight", "bias"):
        own = [getattr(part, name) for part in parts if getattr(part, name) is not None]
        whole = torch.cat([tensor.detach() for tensor in own]) if own else None
        joined.append(whole)
        if whole is not None:
            views = torch.split(whole, [part.out_features for part in parts])
            for part, view in zip(parts, views, strict=True):
                setattr(part, name, nn.Parameter(view, requires_grad=False))
    weight, bias = joined
    assert weight is not None
    return weight, bias


def _norm(module: Any) -> _Norm:
    return _Norm.of(module.weight.detach(), float(module.variance_epsilon))


def _norm_if_any(module: nn.Module, name: str) -> RowFunction:
    return _norm(getattr(module, name)) if hasattr(module, name) else lambda x: x
