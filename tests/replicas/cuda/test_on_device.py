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
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from replicas.cuda import FixedPass, Kind
from replicas.drafters.eagle3.config import head_config
from replicas.drafters.eagle3.layer import HeadLayer
from replicas.drafters.eagle3.weights import Head
from replicas.invariant.device import chunked_attention
from replicas.invariant.modules import compute_in_tiles
from replicas.invariant.ops import Arithmetic
from replicas.kv_cache import BlockAllocator, CacheShape, PagedCache
from replicas.models.attention import GatherBackend
from replicas.models.attention.paged import FlexAttention, NotPaged, PagedBackend, VarlenAttention
from replicas.models.decoder import JoinedDecoder
from replicas.models.paged_model import ATTENTION, PagedModel, fill
from tests.replicas.heads import TARGET_VOCAB, said
from tests.tiny_pairs import ARCHITECTURES, random_model

META, GPU = torch.device("meta"), torch.device("cuda")
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
        for one in tree_leaves((args, kwargs, out)):
            if isinstance(one, torch.Tensor) and one.device.type != META.type:
                raise OfTheHost(f"{func}: {tuple(one.shape)} on {one.device}")
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
            isinstance(index, tuple) and any(isinstance(one, list) for one in index)
        )
        if listed or func in self._MADE_OF_NUMBERS:
            raise OfTheHost(f"{func.__name__} of numbers")
        return func(*args, **kwargs or {})


@contextmanager
def recordable() -> Iterator[None]:
    """What is done within could be recorded."""
    with DeviceOnly(), NoNumbers():
        yield


class Unwaited(TorchDispatchMode):
    """Lets tensors of the host in only where it need not wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if len({x.device.type for x in tensors}) > 1:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            if not given.get("non_blocking"):
                raise OfTheHost(f"{func} waits for a copy")
            self.sent += 1
        return out


@pytest.fixture(autouse=True)
def _without_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What looks at numbers as a model is loaded, before any step, is left out."""
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    # It knows no such device, and is compiled on a GPU: what counts is what it is given.
    monkeypatch.setattr(flex_attention, "flex_attention", flex_on_meta)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with torch.inference_mode():
        yield


def flex_on_meta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any, **_: Any
) -> torch.Tensor:
    seen = block_mask.mask_mod(*(torch.zeros(2, dtype=torch.int64, device=META),) * 4)
    assert seen.dtype is torch.bool
    assert block_mask.shape[-2:] == (query.shape[2], key.shape[2])
    return query * (key.sum() + value.sum())


def model_on_meta(
    architecture: str,
    dtype: torch.dtype,
    join: bool = True,
    attention: str = "gather",
    tiled: bool = False,
) -> PagedModel:
    """A model without weights, as it is on a GPU."""
    block_size = 256 if attention == "varlen" else 16
    with META:
        model = random_model(architecture).to(dtype).eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = CacheShape(block_size, CONTEXT, heads, kv_heads, head_dim)
    cache = PagedCache(
        config.num_hidden_layers, kv_heads, head_dim, BLOCKS, block_size, dtype, META
    )
    if tiled:
        compute_in_tiles(model)
        backend: Any = GatherBackend(cache, shape, chunked_attention)
    elif attention == "flex":
        backend = PagedBackend(cache, shape, FlexAttention(BLOCKS, block_size, CONTEXT, GPU))
    elif attention == "varlen":
        backend = PagedBackend(cache, shape, VarlenAttention(dtype, GPU))
    else:
        backend = GatherBackend(cache, shape)
    decoder = JoinedDecoder(model, cache, CONTEXT, False) if join and not tiled else None
    return PagedModel(model, cache, backend, Arithmetic(), decoder)


@pytest.mark.parametrize(
    ("architecture", "dtype", "more"),
    [
        # What goes into the cache is made finite in float16.
        *((one, torch.float16, {"join": True}) for one in ARCHITECTURES),
        *((one, torch.bfloat16, {"join": False}) for one in ARCHITECTURES),
        *((one, torch.bfloat16, {"tiled": True}) for one in ARCHITECTURES),
        *(
            ("qwen3", torch.bfloat16, {"join": join, "attention": attention})
            for attention in ("flex", "varlen")
            for join in (True, False)
        ),
    ],
    ids=str,
)
def test_every_kind_of_pass_can_be_recorded(
    architecture: str, dtype: torch.dtype, more: dict[str, Any]
) -> None:
    """Through the standing tensors, as on a GPU."""
    try:
        model = model_on_meta(architecture, dtype, **more)
    except NotPaged as error:
        pytest.skip(str(error))
    taps = (0, 1) if "attention" not in more else ()
    for width in (1, 4):
        kind = Kind(ROWS, width, 80 // model.backend.shape.block_size or 1)
        one = FixedPass(model, model.backend.shape, kind, taps, None)
        with recordable():
            out = one.compute()
        assert out.logits is not None
        assert out.logits.shape == (ROWS * width, model.vocab)
        assert len(out.taps) == len(taps)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_so_can_passes_of_a_head(kind: str) -> None:
    target = random_model("llama").config
    config = head_config(said(True, kind, draft_vocab_size=TARGET_VOCAB), set(), target)
    with META:
        tensors = {name: torch.empty(shape) for name, shape in config.tensors.items()}
        embeddings = torch.empty(TARGET_VOCAB, config.target_width)
    shape = CacheShape(16, CONTEXT, 4, 2, 8)
    cache = PagedCache(1, 2, 8, BLOCKS, 16, torch.float32, META)
    head = Head(config, tensors, None)
    layer = HeadLayer(head, embeddings, cache, shape, GatherBackend(cache, shape), False)
    one = FixedPass(layer, shape, Kind(ROWS, 1, 5), (), None, config.width)
    with recordable():
        out = one.compute()
    assert out.logits is not None
    assert out.logits.shape == (ROWS, TARGET_VOCAB)
    assert [tap.shape for tap in out.taps] == [(ROWS, config.width)]


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.ones(2, 2),
        lambda x: x[torch.zeros(2, dtype=torch.int64)],
        lambda x: x[:, [0, 1]],
        lambda x: x + torch.tensor([1.0, 2.0], device=x.device),
        lambda x: x.cpu(),
    ],
)
def test_what_cannot_be_recorded_is_found(spoilt: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(2, 2, device=META)
    with pytest.raises((OfTheHost, RuntimeError)), recordable():  # NotImplementedError is one
        spoilt(x)


@pytest.mark.parametrize("cached", [0, 8])
@pytest.mark.parametrize("lengths", [[40, 40, 40], [9, 40, 23]])
def test_prefill_waits_for_no_copy(lengths: list[int], cached: int) -> None:
    """So that the host launches the draft's passes while the target's still run."""
    model = model_on_meta("qwen3", torch.bfloat16)
    allocator = BlockAllocator(BLOCKS, 16)
    for index, length in enumerate(lengths):
        allocator.grow(str(index), length)
    table = allocator.table([str(index) for index in range(len(lengths))], META)
    contents = [[7] * length for length in lengths]
    with Unwaited() as mode:
        ranges = [(cached * (row % 2), length) for row, length in enumerate(lengths)]
        fill(model, contents, ranges, table, 48)
    assert mode.sent > 3


def test_a_copy_that_waits_is_found() -> None:
    with pytest.raises(OfTheHost, match="waits"), Unwaited():
        torch.ones(2).to(META)
    with pytest.raises(OfTheHost, match="waits"), Unwaited():
        torch.ones(2, device=META)[torch.arange(2)]
