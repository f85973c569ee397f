"""Puts a loaded model on its paged cache: the fastest forward pass that computes what it computes.

Layers are joined where the model is of a known make, and where the check at load (`load_check`)
finds their logits about as near to the truth as the model's own. Other models keep their layers,
and pass the same check or are refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.errors import PairRefused, TooLittleMemory
from replicas.invariant import (
    COUNTS,
    TILE,
    Arithmetic,
    HostBackend,
    Product,
    compute_in_tiles,
    prove,
    what_changes_logits,
)
from replicas.kv_cache import BlockGroups, CacheShape, LayerShape, PagedCache
from replicas.models.decoder import JoinedDecoder, NotJoined
from replicas.models.device_attention import paged_backend
from replicas.models.load_check import Finding, LoadCheck
from replicas.models.own_code.layer_reading import layers_of
from replicas.models.own_code.own_layers import OwnProducts
from replicas.models.paged_model import AttentionBackend, Output, PagedModel
from replicas.models.reference import FINER
from replicas.models.weights.rank_weights import is_part

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
    groups: BlockGroups | None = None,
) -> tuple[PagedModel, str]:
    """The model on a cache of `blocks`, and how it computes, for people.

    Not `exact`: its output decides no token, so nothing is proven or padded for it. `groups`: which
    layers share a block table; None: all. Raises
    PairRefused for what cannot be served.
    """
    begun_s, on_host = time.monotonic(), computes_on_host(config, model.device)
    cache = cache_of(layers_of(model), config, blocks, context_len, model, groups)
    check = LoadCheck(model, cache.shape, cache.rooms)
    deterministic = exact and config.deterministic
    paged: PagedModel | None = None
    try:
        if not deterministic or (on_host and model.dtype is torch.float32):
            paged, layers = _usual(model, cache, prepack and on_host, on_host, exact, check)
        if paged is None or (deterministic and not paged.arithmetic.proven):
            paged, layers = _in_tiles(model, cache, on_host, check)
    except (PairRefused, TooLittleMemory, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of a model's own code
        _log.warning("%s: the check at load failed", name, exc_info=True)
        raise PairRefused(
            f"{name}: {type(model).__name__} is not served: its code fails over a cache that"
            " several requests share"
        ) from error
    built = f"{layers}; {paged.arithmetic}"
    _log.info("%s: %s; checked in %.1f s", name, built, time.monotonic() - begun_s)
    return paged, built


@torch.inference_mode()
def trial_logits(paged: PagedModel) -> torch.Tensor:  # [tokens, vocab]
    """The logits of a pass over the first blocks, which belong to no sequence yet."""
    shape = paged.cache.shape
    width = min(shape.context_len, _TRIAL_TOKENS)
    tokens = torch.arange(1, width + 1, device=paged.device) % paged.vocab
    table = torch.arange(1, 1 - (-width // shape.block_size), device=paged.device)[None]
    table = paged.cache.trial_table(table)
    layout = paged.backend.step_layout(table, [0], width).window(0, width)
    out: Output = paged.forward(tokens, layout)
    assert out.logits is not None
    return out.logits


def computes_on_host(config: ReplicaConfig, device: torch.device) -> bool:
    """Whether attention is that of a CPU, whose cache lies by head."""
    return device.type == "cpu" and not config.fixed_shapes(device)


def cache_of(
    layers: Sequence[LayerShape],
    config: ReplicaConfig,
    blocks: int,
    context_len: int,
    beside: PreTrainedModel,
    groups: BlockGroups | None = None,
) -> PagedCache:
    """A cache of so many blocks for these layers, on the device of a model and in its dtype."""
    device = beside.device
    shape = CacheShape.of(config.block_size, context_len, layers)
    by_head = computes_on_host(config, device)
    return PagedCache(shape, layers, blocks, beside.dtype, device, by_head, groups)


def attention_over(cache: PagedCache, arithmetic: Arithmetic, on_host: bool) -> AttentionBackend:
    """The attention of a CPU or of a GPU; raises PairRefused."""
    if on_host:
        return HostBackend(cache, arithmetic)
    return paged_backend(cache)


def _checked(paged: PagedModel, check: LoadCheck) -> Finding:
    """Raises PairRefused where a model's own layers compute something else over the cache."""
    finding = check.find(paged)
    if not finding.right:
        raise PairRefused(
            f"{type(paged.model).__name__} is not served: beside other requests, in chunks and in"
            " steps it gives other logits than for a request alone (off by"
            f" {finding.error:.1e}, its own rounding is {finding.own_error:.1e})"
        )
    return finding


def _in_tiles(
    model: PreTrainedModel, cache: PagedCache, on_host: bool, check: LoadCheck
) -> tuple[PagedModel, str]:
    """Deterministic: in passes of whole tiles, by the fastest way that is found to be so, and what
    the layers are. Raises PairRefused."""
    arithmetic = Arithmetic((TILE,), proven=True)
    cache.shape = replace(cache.shape, tile=TILE)
    backend = attention_over(cache, arithmetic, on_host)
    check.trial(0)
    # On a host a function of some rows may depend on where its threads divide them.
    if not on_host:
        decoder, layers = _joined(model, cache, False, backend, check)
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
    finding = _checked(paged, check)
    differing = what_changes_logits(paged)
    if differing is not None or not finding.same_bits:
        differing = differing or "the batch"
        raise PairRefused(f"{type(model).__name__}: logits change with {differing}")
    return paged, "separate layers (in tiles)"


def _usual(
    model: PreTrainedModel,
    cache: PagedCache,
    prepack: bool,
    on_host: bool,
    exact: bool,
    check: LoadCheck,
) -> tuple[PagedModel, str]:
    """With joined layers where they can be, and the arithmetic proven on a CPU in float32."""
    arithmetic = Arithmetic(COUNTS if on_host else ())
    backend = attention_over(cache, arithmetic, on_host)
    decoder, layers = _joined(model, cache, prepack, backend, check)
    own: OwnProducts | None = None
    if on_host and exact and model.dtype is torch.float32:
        if decoder is None and is_part(model):
            shapes = None
        elif decoder is None:
            check.trial(0)  # before the model's own layers compute in another way
            own = OwnProducts(model, prepack)
            shapes, rowwise, whole = own.shapes, own.rowwise, own.whole_vectors
        else:
            shapes, rowwise, whole = _shapes(decoder.products), decoder.rowwise, False
        if shapes is not None:
            forms = {(layer.width, layer.soft_cap, layer.sinks) for layer in cache.needs}
            arithmetic = prove(shapes, forms, rowwise, prepack, whole)
            backend = HostBackend(cache, arithmetic)
    if own is not None:
        own.use(arithmetic)
    for product in decoder.products if decoder and on_host else ():
        product.tile = arithmetic.tile
    paged = PagedModel(model, cache, backend, arithmetic, decoder)
    finding = _checked(paged, check)
    if not finding.same_bits and own is not None:
        arithmetic = replace(arithmetic, tokens=(TILE,))
        own.use(arithmetic)
        paged = PagedModel(model, cache, HostBackend(cache, arithmetic), arithmetic)
        finding = _checked(paged, check)
    if not finding.same_bits:
        _log.warning("%s: its sums depend on the batch", type(model).__name__)
        paged.arithmetic = replace(arithmetic, proven=False)
    return paged, f"{layers}, prepacked weights" if prepack else layers


def _joined(
    model: PreTrainedModel,
    cache: PagedCache,
    prepack: bool,
    backend: AttentionBackend,
    check: LoadCheck,
) -> tuple[JoinedDecoder | None, str]:
    check.trial(0)
    try:
        decoder = JoinedDecoder(model, cache, prepack)
    except NotJoined as reason:
        return None, f"separate layers ({reason})"
    finding = check.find(PagedModel(model, cache, backend, Arithmetic(), decoder))
    truly = str(FINER[model.dtype]).removeprefix("torch.")
    figures = f"error {finding.error:.1e} against {truly}, the model's own {finding.own_error:.1e}"
    if not finding.right:
        _log.warning("layers stay separate: %s", figures)
        return None, f"separate layers ({figures})"
    return decoder, f"joined layers ({figures})"


def _shapes(products: Iterable[Product]) -> set[tuple[int, int]]:
    """(in, out) of each weight."""
    return {(product.weight.shape[1], product.weight.shape[0]) for product in products}
