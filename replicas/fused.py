"""The forward pass of Llama-like decoders with fewer and larger operations.

transformers' own forward spends most of its time, at the sizes of a draft, on the number of its
operations. This one computes the same with a third of them: query, key and value come out of one
product, gate and up out of another, keys and values go into the cache as they lie, the rotation is
looked up in a table and done in place, residuals are added within the products.

It is built from the modules of the loaded model (Llama, Qwen, GLM-4 and others of their make) and
holds their own weights: joined ones take the place of the parts, which become views. A model with
any module that it does not know is left alone, and `check` compares the logits with the model's
own, so that what it computes differently falls back as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, rms_norm, silu
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from replicas.batched import Batched, Gathering, can_batch, fits
from replicas.in_place import Attend
from replicas.paged_cache import PagedCache
from replicas.products import Product
from replicas.windows import Part, Window

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Greatest difference of a logit from the model's own, as a share of the greatest logit: what
another order of the same sums may make in each dtype."""
_ATTENTIONS = {
    "LlamaAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "GlmAttention",
    "Glm4Attention",
}
"""Attention layers that were read and are tested. Others have the same parts and do more with them
where a trial does not see it: scale queries by their position from some length on, say."""

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_LAYER_OUTPUT_NORMS = {"post_self_attn_layernorm", "post_mlp_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_ATTENTION_NORMS = {"q_norm", "k_norm"}
_MLPS = ({"gate_proj", "up_proj", "down_proj", "act_fn"}, {"gate_up_proj", "down_proj"})


class NotFused(Exception):
    """The model is not of this make; the message says where it differs."""


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: torch.Tensor  # [width]
    eps: float
    share: torch.Tensor  # [width, 1], each 1 / width
    floor: torch.Tensor  # [1, 1], epsilon

    @classmethod
    def of(cls, weight: torch.Tensor, eps: float) -> _Norm:
        width = weight.shape[0]
        share = weight.new_full((width, 1), 1 / width)
        return cls(weight, eps, share, weight.new_full((1, 1), eps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda or x.dtype != torch.float32:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        # One product gives mean square and epsilon at once: half the operations of rms_norm here.
        mean = torch.addmm(self.floor, x * x, self.share)
        return (x * mean.rsqrt_()).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: nn.Module
    before_attention: _Norm
    qkv: Product  # (heads + 2 * kv_heads) * head_dim of hidden
    head_norm: tuple[torch.Tensor, float] | None  # [heads + kv_heads, head_dim], epsilon
    out: Product
    after_attention: _Norm | None
    before_mlp: _Norm
    gate_up: Product  # 2 * intermediate of hidden
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: Product
    after_mlp: _Norm | None


class FusedDecoder:
    """The decoder of a model over its paged cache; same arguments and result as PagedModel's."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        context_len: int,
        pack: bool = False,
        batch: bool = False,
    ) -> None:
        """Takes the model's weights over; raises NotFused, and then has changed nothing. `pack` is
        that of `Product.of`; with `batch` steps may take the attention of `replicas.batched` in
        place of the model's."""
        body = _known(model, {"model", "lm_head"}).model
        _known(body, {"embed_tokens", "layers", "norm", "rotary_emb"})
        if type(model.lm_head) is not nn.Linear:
            raise NotFused(f"{type(model.lm_head).__name__} is not a known output layer")
        for layer in body.layers:
            _check_layer(layer)
        first = body.layers[0].self_attn
        self._cache = cache
        self._dim = int(first.head_dim)
        self._kv_heads = first.k_proj.weight.shape[0] // self._dim
        self._heads = first.q_proj.weight.shape[0] // self._dim
        self._scaling = float(first.scaling)
        self._attend = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
        self._embedding = body.embed_tokens.weight
        self._gathering: Gathering | None = None
        if batch and can_batch(self._embedding.device, self._embedding.dtype):
            self._gathering = Gathering(cache)
        self._norm = _norm(body.norm)
        self._pack = pack
        self._head = self._product(model.lm_head)
        positions = torch.arange(context_len, device=self._embedding.device)
        cos, sin = body.rotary_emb(self._embedding, positions[None])
        self._cos, self._sin = cos[0], sin[0]  # [context_len, rotated]
        self._rotate = sys.modules[type(first).__module__].apply_rotary_pos_emb
        self._in_place = self._rotates_halves()
        self._other_half = torch.tensor([1, 0], device=self._embedding.device)
        # cos, and sin with the sign that its half gets: one look-up per pass.
        signed = torch.cat((-self._sin[:, : self._dim // 2], self._sin[:, self._dim // 2 :]), -1)
        self._table = torch.stack((self._cos, signed), dim=1)  # [context_len, 2, rotated]
        self._layers = [self._joined(layer) for layer in body.layers]

    def forward(
        self,
        tokens: torch.Tensor,  # [rows, width], or [1, tokens] where the window is packed; int64
        window: Window,
        logits_to_keep: int = 0,
        attend: Attend | None = None,
    ) -> torch.Tensor:  # [rows, width or logits_to_keep, vocab]
        """Logits of the window's positions; their KV entries are written on the way."""
        rows, width = tokens.shape
        x = self._layered(tokens, window, attend, fill=False)
        if logits_to_keep:
            x = x.view(rows, width, -1)[:, -logits_to_keep:].reshape(rows * logits_to_keep, -1)
        logits = self._head(self._norm(x))
        return logits.view(rows, -1, logits.shape[-1])

    def fill(self, tokens: torch.Tensor, window: Window, attend: Attend | None = None) -> None:
        """Write the KV entries of the window's positions and compute no more than that takes."""
        self._layered(tokens, window, attend, fill=True)

    def _layered(
        self, tokens: torch.Tensor, window: Window, attend: Attend | None, fill: bool
    ) -> torch.Tensor:  # [tokens, hidden]
        """All layers; to `fill`, the last one ends where its keys and values are written."""
        # Each with what its attention is told besides; all layers fold the same masks.
        parts: list[tuple[Part, dict[str, Any]]] = [(window, {"in_place": attend})]
        batched: Batched | None = None
        gathering = None if fill or attend is not None else self._gathering
        if gathering is not None and fits(window, self._heads):
            shape = (self._heads, self._kv_heads, self._dim)
            batched = Batched(window, tokens.numel(), shape, self._scaling, self._cache, gathering)
        elif attend is None:
            group = self._heads // self._kv_heads
            read = window.parts or (window,)
            parts = [
                (part, {"causal": True} if part.first else {"folded_mask": part.folded_mask(group)})
                for part in read
            ]
        x = embedding(tokens.reshape(-1), self._embedding)
        positions = window.positions.reshape(-1)
        if self._in_place:
            cos, sin = self._table.index_select(0, positions)[:, :, None].unbind(1)
            sin = sin.view(-1, 1, 2, self._dim // 2)
        else:
            cos, sin = self._cos[positions], self._sin[positions]
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = self._written(index, layer, layer.before_attention(x), cos, sin)
            if fill and index == last:
                break
            if batched is not None:
                out = batched(index, qkv)
            else:
                out = self._attention(index, layer, qkv, window, parts)
            x = _added(x, out, layer.out, layer.after_attention)
            gate, up = layer.gate_up(layer.before_mlp(x)).chunk(2, -1)
            x = _added(x, layer.activation(gate).mul_(up), layer.down, layer.after_mlp)
        return x

    def _written(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,  # [tokens, hidden]
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:  # [tokens, heads + 2 * kv_heads, head_dim]
        """Queries, keys and values, rotated; the last two are in the cache then."""
        heads, turned = self._heads, self._heads + self._kv_heads
        qkv = layer.qkv(x).view(x.shape[0], -1, self._dim)
        both = qkv[:, :turned]  # the heads that are rotated: queries, then keys
        if layer.head_norm is not None:
            weight, eps = layer.head_norm
            both.copy_(rms_norm(both, (self._dim,), None, eps)).mul_(weight)
        if self._in_place:
            halves = both.view(-1, turned, 2, self._dim // 2)
            swapped = halves.index_select(2, self._other_half)
            both.mul_(cos)
            halves.addcmul_(swapped, sin)
        else:
            query, key = self._rotate(
                both[None, :, :heads].transpose(1, 2),
                both[None, :, heads:].transpose(1, 2),
                cos[None],
                sin[None],
            )
            both[:, :heads] = query[0].transpose(0, 1)
            both[:, heads:] = key[0].transpose(0, 1)
        self._cache.write(index, qkv[:, heads:].view(-1, 2, self._kv_heads, self._dim))
        return qkv

    def _attention(
        self,
        index: int,
        layer: _Layer,
        qkv: torch.Tensor,  # [tokens, heads + 2 * kv_heads, head_dim]
        window: Window,
        parts: list[tuple[Part, dict[str, Any]]],
    ) -> torch.Tensor:  # [tokens, heads * head_dim]
        heads = self._heads
        grid = window.unpack(qkv[:, :heads])  # [cells of all parts, heads, head_dim]
        whole, end = None, 0
        if len(parts) > 1 or parts[0][0].rows * parts[0][0].width < grid.shape[0]:
            whole = grid.new_empty(grid.shape)
        for of, further in parts:
            own = slice(end, end + of.rows * of.width)
            end = own.stop
            if of.first:
                fresh = qkv[own, heads:].view(of.rows, of.width, 2, self._kv_heads, self._dim)
                keys, values = fresh.permute(2, 0, 3, 1, 4).unbind(0)
            else:
                keys, values = self._cache.read(index, of)
            out, _ = self._attend(
                layer.attention,
                grid[own].view(of.rows, of.width, heads, self._dim).transpose(1, 2),
                keys,
                values,
                of.mask,
                scaling=self._scaling,
                **further,
            )
            if whole is not None:
                whole[own].view(out.shape).copy_(out)
        if whole is not None and end < whole.shape[0]:
            whole[end:].zero_()  # what belongs to no part stays finite
        return window.pack(out.flatten(0, 1) if whole is None else whole).flatten(1)

    def _joined(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = Product.of(*_join((attention.q_proj, attention.k_proj, attention.v_proj)), self._pack)
        if hasattr(mlp, "gate_up_proj"):
            gate_up, activation = self._product(mlp.gate_up_proj), mlp.activation_fn
        else:
            gate_up = Product.of(*_join((mlp.gate_proj, mlp.up_proj)), self._pack)
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
            attention=attention,
            before_attention=_norm(layer.input_layernorm),
            qkv=qkv,
            head_norm=head_norm,
            out=self._product(attention.o_proj),
            after_attention=_norm_if_any(layer, "post_self_attn_layernorm"),
            before_mlp=_norm(layer.post_attention_layernorm),
            gate_up=gate_up,
            activation=silu if isinstance(activation, nn.SiLU) else activation,
            down=self._product(mlp.down_proj),
            after_mlp=_norm_if_any(layer, "post_mlp_layernorm"),
        )

    def _product(self, layer: nn.Linear) -> Product:
        return Product.of(layer.weight, layer.bias, self._pack)

    def _rotates_halves(self) -> bool:
        """Whether the model rotates the two halves of a whole head against each other."""
        if self._cos.shape[-1] != self._dim:
            return False
        x = torch.linspace(-1, 1, self._dim, device=self._cos.device, dtype=self._cos.dtype)
        last = slice(-1, None)
        cos, sin = self._cos[None, last], self._sin[None, last]
        turned, _ = self._rotate(x.view(1, 1, 1, -1), x.view(1, 1, 1, -1), cos, sin)
        low, high = x.chunk(2)
        by_halves = x * cos + torch.cat((-high, low)) * sin
        return bool(torch.equal(turned.view(-1), by_halves.view(-1)))


def _added(
    x: torch.Tensor, out: torch.Tensor, product: Product, norm: _Norm | None
) -> torch.Tensor:
    """The residual x and the layer's output, in one product where nothing stands between."""
    return product.added(out, x) if norm is None else x + norm(product(out))


def _join(parts: Iterable[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and bias for layers of the same input; theirs become views, so none is doubled."""
    parts = tuple(parts)
    weights = [part.weight.detach() for part in parts]
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    weight = _whole(weights)
    bias = _whole(biases) if biases else None
    begin = 0
    for part in parts:
        end = begin + part.out_features
        part.weight = nn.Parameter(weight[begin:end], requires_grad=False)
        if bias is not None:
            part.bias = nn.Parameter(bias[begin:end], requires_grad=False)
        begin = end
    return weight, bias


def _whole(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts one after the other. If another replica has joined them it is what they are views
    of, else a new tensor."""
    first, begin = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != begin or not part.is_contiguous():
            return torch.cat(parts)
        begin += part.numel() * part.element_size()
    if len({part.untyped_storage().data_ptr() for part in parts}) > 1:
        return torch.cat(parts)
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _norm(module: nn.Module) -> _Norm:
    eps = getattr(module, "variance_epsilon", None)
    if "RMSNorm" not in type(module).__name__ or eps is None:
        raise NotFused(f"{type(module).__name__} is not a known norm")
    return _Norm.of(module.get_parameter("weight").detach(), float(eps))


def _norm_if_any(module: nn.Module, name: str) -> _Norm | None:
    return _norm(getattr(module, name)) if hasattr(module, name) else None


def _check_layer(layer: Any) -> None:
    _known(layer, _LAYER, _LAYER_OUTPUT_NORMS)
    attention = _known(layer.self_attn, _ATTENTION, _ATTENTION_NORMS)
    names = {name for name, _ in layer.mlp.named_children()}
    known = next((mlp for mlp in _MLPS if mlp <= names), None)
    if known is None:
        raise NotFused(f"{type(layer.mlp).__name__} is not a known feed-forward layer")
    _known(layer.mlp, known, {"activation_fn"})
    for module in (*attention.children(), *layer.mlp.children(), *layer.children()):
        if isinstance(module, nn.Linear) or "Norm" in type(module).__name__:
            _known(module, set())
            if any(type(weight.data) is not torch.Tensor for weight in module.parameters()):
                raise NotFused(f"{type(module).__name__} holds no plain weights")
        if "Norm" in type(module).__name__:
            _norm(module)
    projections = [getattr(attention, name) for name in sorted(_ATTENTION)]
    products = [*projections, *(getattr(layer.mlp, name) for name in known if "proj" in name)]
    if any(type(one) is not nn.Linear for one in products):
        raise NotFused(f"{type(layer).__name__} has projections of another kind")
    inputs = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
    if len({one.bias is None for one in inputs}) > 1:
        raise NotFused(f"{type(attention).__name__} has a bias in some projections only")
    if type(attention).__name__ not in _ATTENTIONS:
        raise NotFused(f"{type(attention).__name__} is not a known attention layer")


def _known(module: nn.Module, needed: set[str], others: set[str] | None = None) -> Any:
    """The module, if it has these children, at most some of the others, and its class's forward."""
    names = {name for name, _ in module.named_children()}
    if not needed <= names <= needed | (others or set()):
        raise NotFused(f"{type(module).__name__} has the parts {sorted(names)}")
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        raise NotFused(f"{type(module).__name__} has a forward pass of its own")
    return module
