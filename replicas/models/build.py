"""Puts a loaded model on its paged cache: the fastest forward pass that computes what it computes.

Layers are joined where the model is of a known make, and where the joined logits are about as near
to the truth as the model's own: the error of both is measured against a finer dtype (float64 for
float32) on a few tokens. A model with large activations is far from it in either way, so no fixed
tolerance would do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.errors import PairRefused
from replicas.invariant import (
    COUNTS,
    TILE,
    Arithmetic,
    HostBackend,
    Product,
    RowFunction,
    compute_in_tiles,
    prove,
    what_changes_logits,
)
from replicas.kv_cache import CacheShape, PagedCache
from replicas.models.decoder import JoinedDecoder, NotJoined
from replicas.models.device_attention import paged_backend
from replicas.models.model_shape import ModelShape
from replicas.models.paged_model import ERROR_FLOOR, AttentionBackend, Output, PagedModel
from replicas.models.reference import FINER, own_logits

ERROR_RATIO_MOST = 4.0
"""Joined layers may be so many times as far from float64 as the model's own forward pass."""
_TRIAL_TOKENS = 8

_log = logging.getLogger("lockstep.replica")


def build_model(
    model: PreTrainedModel,
    name: str,
    config: ReplicaConfig,
    blocks: int,
    context_len: int,
    prepack: bool,
    exact: bool = True,
) -> tuple[PagedModel, str]:
    """The model on a cache of `blocks`, and how it computes, for people.

    Not `exact`: its output decides no token, so nothing is proven or padded for it. Raises
    PairRefused for what cannot be served.
    """
    sizes, on_host = ModelShape.of(model.config), computes_on_host(config, model.device)
    deterministic = exact and config.deterministic
    paged: PagedModel | None = None
    try:
        cache = cache_of(sizes, config, blocks, context_len, model)
        if not deterministic or (on_host and model.dtype is torch.float32):
            paged, layers = _usual(model, cache, prepack and on_host, on_host, exact)
        if paged is None or (deterministic and not paged.arithmetic.proven):
            paged, layers = _in_tiles(model, cache, on_host)
    except Exception as error:  # also of a model's own code
        raise PairRefused(f"{name}: a trial forward pass failed: {error}") from error
    built = f"{layers}; {paged.arithmetic}"
    _log.info("%s: %s", name, built)
    return paged, built


@torch.inference_mode()
def trial_logits(paged: PagedModel) -> torch.Tensor:  # [tokens, vocab]
    """The logits of a pass over the first blocks, which belong to no sequence yet."""
    shape = paged.cache.shape
    tokens = _trial_tokens(paged.model, shape)
    width = tokens.shape[0]
    table = torch.arange(1, 1 - (-width // shape.block_size), device=paged.device)[None]
    layout = paged.backend.step_layout(table, [0], width).window(0, width)
    out: Output = paged.forward(tokens, layout)
    assert out.logits is not None
    return out.logits


def computes_on_host(config: ReplicaConfig, device: torch.device) -> bool:
    """Whether attention is that of a CPU, whose cache lies by head."""
    return device.type == "cpu" and not config.fixed_shapes(device)


def cache_of(
    sizes: ModelShape, config: ReplicaConfig, blocks: int, context_len: int, beside: PreTrainedModel
) -> PagedCache:
    """A cache of so many blocks for layers of these sizes, on the device of a model and in its
    dtype."""
    dims, device = (sizes.heads, sizes.kv_heads, sizes.head_dim), beside.device
    shape = CacheShape(config.block_size, context_len, *dims)
    by_head = computes_on_host(config, device)
    return PagedCache(shape, sizes.layers, blocks, beside.dtype, device, by_head)


def attention_over(cache: PagedCache, arithmetic: Arithmetic, on_host: bool) -> AttentionBackend:
    """The attention of a CPU or of a GPU; raises PairRefused."""
    if on_host:
        return HostBackend(cache, arithmetic)
    return paged_backend(cache)


def _in_tiles(model: PreTrainedModel, cache: PagedCache, on_host: bool) -> tuple[PagedModel, str]:
    """Deterministic: in passes of whole tiles, by the fastest way that is found to be so, and what
    the layers are. Raises PairRefused."""
    arithmetic = Arithmetic((TILE,), proven=True)
    cache.shape = replace(cache.shape, tile=TILE)
    backend = attention_over(cache, arithmetic, on_host)
    # On a host a function of some rows may depend on where its threads divide them.
    if not on_host:
        decoder, layers = _joined(model, cache, False, backend)
        for product in decoder.products if decoder else ():
            product.tile = TILE
        if decoder is not None:
            paged = PagedModel(model, cache, backend, arithmetic, decoder)
            differing = what_changes_logits(paged)
            if differing is None:
                return paged, layers
            _log.warning("%s: logits change with %s", layers, differing)
    compute_in_tiles(model)
    paged = PagedModel(model, cache, backend, arithmetic)
    differing = what_changes_logits(paged)
    if differing is not None:
        raise PairRefused(f"{type(model).__name__}: logits change with {differing}")
    return paged, "separate layers (in tiles)"


def _usual(
    model: PreTrainedModel, cache: PagedCache, prepack: bool, on_host: bool, exact: bool
) -> tuple[PagedModel, str]:
    """With joined layers where they can be, and the arithmetic proven on a CPU in float32."""
    arithmetic = Arithmetic(COUNTS if on_host else ())
    backend = attention_over(cache, arithmetic, on_host)
    decoder, layers = _joined(model, cache, prepack, backend)
    products = decoder.products if decoder else []
    if on_host and exact and model.dtype is torch.float32:
        products = products or _tiled_products(model, prepack)
        if products:
            shapes = {(product.weight.shape[1], product.weight.shape[0]) for product in products}
            rowwise = decoder.rowwise if decoder else _rowwise(model)
            arithmetic = prove(shapes, [cache.shape.head_dim], rowwise, prepack)
            backend = HostBackend(cache, arithmetic)
    for product in products if on_host else ():
        product.tile = arithmetic.tile
    paged = PagedModel(model, cache, backend, arithmetic, decoder)
    trial_logits(paged)
    return paged, f"{layers}, prepacked weights" if prepack else layers


def _joined(
    model: PreTrainedModel, cache: PagedCache, prepack: bool, backend: AttentionBackend
) -> tuple[JoinedDecoder | None, str]:
    tokens, finer = _trial_tokens(model, cache.shape), FINER[model.dtype]
    own, truth = own_logits(model, tokens), own_logits(model, tokens, finer)
    try:
        decoder = JoinedDecoder(model, cache, prepack)
    except NotJoined as reason:
        return None, f"separate layers ({reason})"
    joined = trial_logits(PagedModel(model, cache, backend, Arithmetic(), decoder))
    own_error, error = (float((logits - truth).abs().max()) for logits in (own, joined))
    floor = ERROR_FLOOR[model.dtype] * float(truth.abs().max())
    truly = str(finer).removeprefix("torch.")
    figures = f"error {error:.1e} against {truly}, the model's own {own_error:.1e}"
    if not error <= ERROR_RATIO_MOST * own_error + floor:  # NaN, too
        _log.warning("layers stay separate: %s", figures)
        return None, f"separate layers ({figures})"
    return decoder, f"joined layers ({figures})"


def _trial_tokens(model: PreTrainedModel, shape: CacheShape) -> torch.Tensor:
    width = min(shape.context_len, _TRIAL_TOKENS)
    return torch.arange(1, width + 1, device=model.device) % int(model.config.vocab_size)


def _tiled_products(model: PreTrainedModel, prepack: bool) -> list[Product]:
    """Have the model's own linear layers compute in tiles; none of a model with other layers that
    multiply."""
    linears = [layer for layer in model.modules() if type(layer) is nn.Linear]
    known = {id(weight) for layer in linears for weight in layer.parameters()}
    weights = (weight for weight in model.parameters() if weight.dim() > 1)
    embedding = model.get_input_embeddings().weight
    if any(weight is not embedding and id(weight) not in known for weight in weights):
        return []
    if any("forward" in vars(layer) for layer in linears):
        return []  # a rank's part: sums are finished elsewhere
    products = []
    for layer in linears:
        product = Product.of(layer.weight, layer.bias, prepack)
        layer.forward = _forward_of(product)  # type: ignore[method-assign, assignment]
        products.append(product)
    return products


def _forward_of(product: Product) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:  # [..., in] -> [..., out]
        return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return forward


def _rowwise(model: PreTrainedModel) -> list[tuple[RowFunction, int]]:
    """One norm, activation and rotary table of each kind of a model's own layers, and the width of
    its input."""
    functions: dict[tuple[type, int], RowFunction] = {}
    inner = {layer.in_features for layer in model.modules() if type(layer) is nn.Linear}
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            functions[type(module), 1] = _table_of(module)
        elif next(module.children(), None) is None and type(module) not in (
            nn.Linear,
            nn.Embedding,
        ):
            weight = getattr(module, "weight", None)
            for width in inner if weight is None else {weight.shape[-1]}:
                functions[type(module), width] = module
    return [(function, width) for (_, width), function in functions.items()]


def _table_of(rotary: nn.Module) -> RowFunction:
    def table(x: torch.Tensor) -> torch.Tensor:  # [tokens, 1] -> [tokens, 2 * rotated]
        positions = torch.arange(1000)[-x.shape[0] :]
        cos, sin = rotary(x, positions[None])
        return torch.cat((cos[0], sin[0]), -1)

    return table
