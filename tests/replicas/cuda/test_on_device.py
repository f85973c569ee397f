"""Proves that a pass can be recorded: it reads nothing back and needs no host.

Tensors of torch's `meta` device have a shape and no contents, and go the ways of a GPU's here. What
depends on a value raises on them, and a mode that sees every operation finds tensors of the host:
a recording would hold what they are, or could not be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from replicas.cuda import FixedPass, Kind
from replicas.drafters.checkpoints import Head
from replicas.drafters.eagle3.head_config import eagle3_config
from replicas.drafters.eagle3.layer import HeadLayer
from replicas.invariant.modules import compute_in_tiles
from replicas.invariant.ops import TILE, Arithmetic
from replicas.kernels import paged_attention as kernels
from replicas.kv_cache import CacheShape, PagedCache
from replicas.models.decoder import JoinedDecoder
from replicas.models.paged_model import ATTENTION, PagedModel
from tests.gathering import Kernels
from tests.replicas.heads import TARGET_VOCAB, said
from tests.tiny_pairs import ARCHITECTURES, random_model

META = torch.device("meta")
ROWS, BLOCKS, CONTEXT = 4, 64, 512


class OfTheHost(AssertionError):
    """An operation of the device part meets the host's memory."""


class DeviceOnly(TorchDispatchMode):
    """Lets no operation through that meets a tensor of the host. Those that make a shape of values
    raise by themselves."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != META.type:
                raise OfTheHost(f"{func}: {tuple(leaf.shape)} on {leaf.device}")
        return out


class NoNumbers(TorchFunctionMode):
    """Lets no tensor be made of the host's numbers, which copies them below all operations."""

    _MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.Tensor.new_tensor)
    _INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        index = args[1] if func in self._INDEXED else ()
        listed = isinstance(index, list) or (
            isinstance(index, tuple) and any(isinstance(place, list) for place in index)
        )
        if listed or func in self._MADE_OF_NUMBERS:
            raise OfTheHost(f"{func.__name__} of numbers")
        return func(*args, **kwargs or {})


@contextmanager
def recordable() -> Iterator[None]:
    """What is done within could be recorded."""
    with DeviceOnly(), NoNumbers():
        yield


@pytest.fixture(autouse=True)
def _without_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What looks at numbers as a model is loaded, before any step, is left out."""
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    for name in ("attend", "add_pieces"):
        monkeypatch.setattr(kernels, name, OnMeta())
    with torch.inference_mode():
        yield


class OnMeta:
    """A kernel that is not launched: what counts is what it is given."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        assert all(type(size) is int for size in grid)
        return self

    def __call__(self, *given: object, **sizes: object) -> None:
        for value in given:
            assert value.device == META if isinstance(value, torch.Tensor) else value is not None
        assert not any(isinstance(size, torch.Tensor) for size in sizes.values())


def model_on_meta(
    architecture: str, dtype: torch.dtype, join: bool = True, tiled: bool = False
) -> PagedModel:
    """A model without weights, as it is on a GPU."""
    with META:
        model = random_model(architecture).to(dtype).eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = CacheShape(16, CONTEXT, heads, kv_heads, head_dim, TILE if tiled else 1)
    cache = PagedCache(shape, config.num_hidden_layers, BLOCKS, dtype, META)
    arithmetic = Arithmetic((TILE,)) if tiled else Arithmetic()
    backend = Kernels(cache)
    decoder = JoinedDecoder(model, cache, False) if join else None
    if tiled and decoder is None:
        compute_in_tiles(model)
    for product in decoder.products if decoder and tiled else ():
        product.tile = TILE
    return PagedModel(model, cache, backend, arithmetic, decoder)


@pytest.mark.parametrize(
    ("architecture", "dtype", "more"),
    [
        # What goes into the cache is made finite in float16.
        *((architecture, torch.float16, {"join": True}) for architecture in ARCHITECTURES),
        *((architecture, torch.bfloat16, {"join": False}) for architecture in ARCHITECTURES),
        *(
            (architecture, torch.bfloat16, {"tiled": True, "join": join})
            for architecture in ARCHITECTURES
            for join in (True, False)
        ),
    ],
    ids=str,
)
def test_every_kind_of_pass_can_be_recorded(
    architecture: str, dtype: torch.dtype, more: dict[str, Any]
) -> None:
    """Through the standing tensors, as on a GPU."""
    model = model_on_meta(architecture, dtype, **more)
    aux_layers = (0, 1) if "tiled" not in more else ()
    for width in (1, 4):
        one = FixedPass(model, Kind(ROWS, width, 5), aux_layers, None)
        with recordable():
            out = one.compute()
        assert out.logits is not None
        assert out.logits.shape == (ROWS * width, model.vocab)
        assert len(out.aux_hidden_states) == len(aux_layers)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_so_can_passes_of_a_head(kind: str) -> None:
    target = random_model("llama").config
    config = eagle3_config(said(True, kind, draft_vocab_size=TARGET_VOCAB), set(), target)
    with META:
        tensors = {name: torch.empty(shape) for name, shape in config.tensors.items()}
        embeddings = torch.empty(TARGET_VOCAB, config.target_width)
    cache = PagedCache(CacheShape(16, CONTEXT, 4, 2, 8), 1, BLOCKS, torch.float32, META)
    layer = HeadLayer(Head(config, tensors), embeddings, Kernels(cache), False)
    one = FixedPass(layer, Kind(ROWS, 1, 5), (), None, config.width)
    with recordable():
        out = one.compute()
    assert out.logits is not None
    assert out.logits.shape == (ROWS, TARGET_VOCAB)
    assert [states.shape for states in out.aux_hidden_states] == [(ROWS, config.width)]
