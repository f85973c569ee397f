"""Proves that a step's device part can be recorded: it reads nothing back and needs no host.

Tensors of torch's `meta` device have a shape and no contents, and go the ways of a GPU's here. What
depends on a value raises on them, and a mode that sees every operation finds tensors of the host:
a recording would hold what they are, or could not be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import replicas.deterministic
import replicas.fused
import replicas.model
import torch
from replicas.graphs import FixedStep, StepKind
from replicas.in_place import FlexInPlace, InPlace, NotInPlace, VarlenInPlace
from replicas.model import ATTENTION, PagedModel
from replicas.paged_cache import BlockAllocator, PagedCache
from replicas.prefill import prefill
from replicas.tiles import EFFICIENT, TILED, TILES
from replicas.windows import CacheShape, Layout
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from replicas.eqspec import Group
from replicas.sampling import SamplingBatch
from replicas.stopwatch import Stopwatch
from scheduler.messages import SamplingParams
from tests.tiny_pairs import ARCHITECTURES, random_model

META, GPU = torch.device("meta"), torch.device("cuda")
ROWS, BLOCKS = 4, 64
COLD, HOT = (False, 0, False, False), (True, 8, True, True)
STEPS = {
    "no draft": (0, None, COLD),
    "greedy": (3, None, COLD),
    "trimmed": (3, 5, COLD),
    "sampled": (3, None, HOT),
    "sampled and trimmed": (3, 5, HOT),
}
"""Draft length, verified tokens, what is sampled."""


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
    """What looks at logits and tables as a model is loaded, before any step, is left out."""
    monkeypatch.setattr(replicas.model, "alike", lambda *_: True)
    monkeypatch.setattr(replicas.deterministic, "check_invariance", lambda *_: None)
    monkeypatch.setattr(
        replicas.fused.FusedDecoder, "_rotates_halves", lambda self: self._cos.shape[-1] == 8
    )
    monkeypatch.setitem(TILES, META.type, TILES["cuda"])
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


@dataclass(frozen=True)
class Models:
    target: PagedModel
    draft: PagedModel
    shape: CacheShape


def models(
    architecture: str,
    dtype: torch.dtype,
    fuse: bool,
    make: Callable[[CacheShape], InPlace] | None = None,
    tiled: str | None = None,
    block_size: int = 16,
) -> Models:
    """A pair without weights, with attention in place, or the target in tiles."""
    shape = CacheShape(block_size, 512, dtype)
    paged = []
    for role in ("target", "draft"):
        with META:
            model = random_model(architecture).to(dtype).eval().requires_grad_(False)
        model.set_attn_implementation(ATTENTION)
        whole = fuse
        if tiled and role == "target":
            replicas.deterministic.make_deterministic(model, shape.context_len)
            model.set_attn_implementation(tiled)
            whole = False
        sizes = (model.config.num_hidden_layers, 2, 8, BLOCKS, block_size)
        one = PagedModel(model, PagedCache(*sizes, dtype, META))
        one.try_out(shape, fuse=whole)
        assert one.fused == whole
        assert one.packs
        if make is not None:
            one.attend(make(shape))
        paged.append(one)
    return Models(*paged, shape)


def record(pair: Models, step: str) -> FixedStep:
    """As on a GPU: through the standing buffers, once to draft and once to verify."""
    k, verify_tokens, sampling = STEPS[step]
    columns = 80 // pair.shape.block_size or 1
    kind = StepKind(ROWS, k, columns, verify_tokens, sampling)
    fixed = FixedStep(pair.target, pair.draft, pair.shape, kind, META, None)
    untimed = Stopwatch(torch.device("cpu"))
    with recordable():
        proposal = fixed._propose(untimed)
        out = replicas.graphs.check(pair.target, fixed._inputs, proposal, untimed).joined()
    assert out.shape == (2 + 2 * k, ROWS)
    assert out.dtype is torch.int64
    return fixed


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kind_of_step_can_be_recorded(architecture: str, fuse: bool) -> None:
    """In float16, what goes into the cache is made finite besides."""
    pair = models(architecture, torch.float16 if fuse else torch.bfloat16, fuse)
    for step in STEPS:
        record(pair, step)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kind", ["flex", "varlen"])
def test_so_can_steps_with_attention_in_place(kind: str, fuse: bool) -> None:
    def make(shape: CacheShape) -> InPlace:
        if kind == "flex":
            return FlexInPlace(BLOCKS, shape.block_size, shape.context_len, GPU)
        return VarlenInPlace(shape.dtype, GPU)

    try:
        pair = models("qwen3", torch.bfloat16, fuse, make, block_size=16 if kind == "flex" else 256)
    except NotInPlace as error:
        pytest.skip(str(error))
    for step in STEPS:
        record(pair, step)


@pytest.mark.parametrize("attention", [TILED, EFFICIENT])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_so_can_deterministic_steps(architecture: str, attention: str) -> None:
    pair = models(architecture, torch.bfloat16, True, tiled=attention)
    for step in STEPS:
        record(pair, step)


def test_a_draft_of_another_vocabulary_is_fed_without_the_host() -> None:
    pair = models("llama", torch.bfloat16, True)
    pair.draft.vocab -= 5
    record(pair, "sampled")


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


@pytest.mark.parametrize("lengths", [[40, 40, 40], [9, 40, 23]])
def test_prefill_waits_for_no_copy(lengths: list[int]) -> None:
    """So that the host launches the draft's passes while the target's still run."""
    pair = models("qwen3", torch.bfloat16, True)
    allocator = BlockAllocator(BLOCKS, pair.shape.block_size)
    for index, length in enumerate(lengths):
        allocator.grow(str(index), length)
    with Unwaited() as mode:
        prefill(
            [pair.target],
            contents=[[7] * length for length in lengths],
            spans=[(0, length) for length in lengths],
            table=allocator.table([str(index) for index in range(len(lengths))], META),
            shape=pair.shape,
            chunk=16,
        )
    assert mode.sent > 3


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_filled_without_waiting(step: str) -> None:
    pair = models("qwen3", torch.bfloat16, True)
    fixed = record(pair, step)
    k, verify_tokens, sampling = STEPS[step]
    params = SamplingParams(temperature=0.7, top_k=8, top_p=0.9, min_p=0.1)
    with Unwaited() as mode:
        batch = SamplingBatch.of(
            [params if sampling == HOT else SamplingParams()] * 3, META, True, True
        )
        table = torch.zeros((3, 2), dtype=torch.int64, device=META)
        fixed._fill(Group([[1, 2, 3]] * 3, [k] * 3, batch, table, verify_tokens))
    assert mode.sent == (7 if sampling == HOT else 1)


def test_a_copy_that_waits_is_found() -> None:
    with pytest.raises(OfTheHost, match="waits"), Unwaited():
        torch.ones(2).to(META)
    with pytest.raises(OfTheHost, match="waits"), Unwaited():
        torch.ones(2, device=META)[torch.arange(2)]


def test_the_layout_of_a_passes_rows_comes_from_the_device() -> None:
    """A group's starts are known on the host; that of a recorded step's are not."""
    shape = CacheShape(16, 512, torch.bfloat16)
    table = torch.zeros((2, 4), dtype=torch.int64, device=META)
    with Unwaited() as mode:
        Layout(table, [3, 5], 4, shape).window(0, 4)
    assert mode.sent == 1
