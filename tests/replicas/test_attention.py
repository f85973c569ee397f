"""Proves that an attention is taken only if it computes the same, and the fastest of those.

The plain choice is a function of times; a trial must see every mistake that a kernel could make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from pydantic import ValidationError

from cluster.local_engine import LocalEngine
from replicas import attention
from replicas.attention import FLEX, GATHER, Place, checked, fastest, measured, quickest
from replicas.config import ReplicaConfig
from replicas.in_place import Attend, FlexInPlace, InPlace, NotInPlace
from replicas.model import PagedModel, scaled_dot_product_attention
from replicas.pair import PairRefused
from replicas.windows import Window
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from tests.oracle.test_trimmed import Trimming
from tests.oracle.worlds import mixed_requests, run_staggered, sampled
from tests.replicas.test_fused import BLOCKS, SHAPE, paged, uneven_model
from tests.tiny_pairs import VOCAB, tiny_replica

PLACE = Place(BLOCKS, SHAPE, rows_most=4, draft_len=4, pass_tokens=64, fixed_shapes=False)


# --------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"gather": [2.0, 2.0]}, "gather"),
        ({"gather": [2.0, 2.0], "flex": [1.0, 1.0]}, "flex"),
        ({"gather": [2.0, 2.0], "flex": [3.0, 3.0]}, "gather"),
        ({"gather": [2.0, 2.0], "flex": [1.5, 1.5], "varlen": [1.0, 1.0]}, "varlen"),
        # A pass counts as its share of gathering's: the long one alone does not decide.
        ({"gather": [1.0, 100.0], "flex": [4.0, 50.0]}, "gather"),
        ({"gather": [1.0, 100.0], "flex": [1.5, 50.0]}, "flex"),
        # A gain within the noise is none.
        ({"gather": [1.0, 1.0], "flex": [0.99, 0.99]}, "gather"),
        ({"gather": [1.0, 1.0], "flex": [0.97, 0.97]}, "flex"),
        ({"gather": [], "flex": []}, "gather"),
    ],
)
def test_the_fastest_is_taken_if_it_is_faster_than_gathering(
    times: dict[str, Sequence[float]], expected: str
) -> None:
    assert fastest(times) == expected
    assert fastest(dict(reversed(times.items()))) == expected


# --------------------------------------------------------------------------- the trial


class Plain:
    """In place by plain operations over the whole cache; `spoil` changes what is seen."""

    fills = True

    def __init__(self, spoil: Callable[[torch.Tensor, Window], torch.Tensor] | None = None) -> None:
        self._spoil = spoil
        self.passes = 0

    def enter(self, window: Window) -> Attend:
        self.passes += 1
        table = window.blocks.view(window.rows, -1)
        columns = torch.arange(table.shape[1] * SHAPE.block_size)
        last = window.starts[:, None] + torch.arange(window.width)
        seen = columns <= last[:, :, None]  # [rows, width, positions]
        if self._spoil is not None:
            seen = self._spoil(seen, window)

        def attend(
            query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
        ) -> torch.Tensor:
            own_keys, own_values = (x[table].flatten(1, 2).transpose(1, 2) for x in (keys, values))
            return scaled_dot_product_attention(
                query, own_keys, own_values, seen[:, None], scale=scaling, enable_gqa=True
            ).transpose(1, 2)

        return attend


@cache
def model(fuse: bool, dtype: torch.dtype = torch.float32) -> PagedModel:
    return paged(uneven_model("qwen3").to(dtype), fuse, dtype=dtype)


@pytest.mark.parametrize("fuse", [True, False])
def test_an_attention_that_computes_the_same_is_given_to_the_model(fuse: bool) -> None:
    one = model(fuse)
    assert one.packs, "or packed windows are not tried"
    for make in (
        Plain,
        lambda: FlexInPlace(BLOCKS, SHAPE.block_size, SHAPE.context_len, one.device),
    ):
        in_place = checked(one, make, PLACE)
        assert one._in_place is in_place
        one.attend(None)


def of_width(width: int) -> Callable[[torch.Tensor, Window], torch.Tensor]:
    return lambda seen, window: seen.logical_or(torch.tensor(window.width == width))


MISTAKES: dict[str, Callable[[torch.Tensor, Window], torch.Tensor]] = {
    "one position too many": lambda seen, window: seen.logical_or(seen.roll(1, -1)),
    "one position too few": lambda seen, window: seen & seen.roll(-1, -1),
    "all queries of a window see the same": lambda seen, window: seen[:, -1:].expand_as(seen),
    "all rows are as long as the first": lambda seen, window: seen[:1].expand_as(seen),
    "the first block alone": lambda seen, window: (
        seen & (torch.arange(seen.shape[-1]) < SHAPE.block_size)
    ),
    "wrong in single tokens": of_width(1),
    "wrong in the draft's first pass": of_width(2),
    "wrong in verification": of_width(5),
    "wrong in prefill": of_width(33),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_shows_in_the_trial(mistake: str, dtype: torch.dtype) -> None:
    """Whatever rounding is let pass in that dtype."""
    one, place = model(True, dtype), replace(PLACE, shape=replace(SHAPE, dtype=dtype))
    assert checked(one, Plain, place)
    one.attend(None)
    with pytest.raises(NotInPlace, match="logits differ"):
        checked(one, lambda: Plain(MISTAKES[mistake]), place)
    assert one._in_place is None, "it gathers again"


def test_the_widest_verification_is_tried() -> None:
    """A kernel that has no room for so many queries is found at load, and not by a batch."""
    one = model(True)
    checked(one, lambda: Plain(of_width(12)), replace(PLACE, draft_len=10))
    one.attend(None)
    with pytest.raises(NotInPlace, match="of width 12"):
        checked(one, lambda: Plain(of_width(12)), replace(PLACE, draft_len=11))


@pytest.mark.parametrize(("draft_len", "pass_tokens"), [(4, 64), (0, 5), (8, 4096)])
def test_a_trial_stays_within_what_is_planned_for_steps_and_prefill(
    draft_len: int, pass_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single row's passes are the least there can be."""
    one = paged(uneven_model("qwen3"), True)
    place = replace(PLACE, draft_len=draft_len, pass_tokens=pass_tokens)
    checked_tokens: list[tuple[int, ...]] = []
    filled: list[int] = []
    wide: set[int] = set()
    forward, fill = one.forward, one.fill

    def noted(tokens: torch.Tensor, window: Window, logits_to_keep: int = 0) -> torch.Tensor:
        checked_tokens.append(tuple(tokens.shape))
        if window.width == 33 and tokens.shape[1] == 33:
            wide.update(window.starts.tolist())
        return forward(tokens, window, logits_to_keep)

    def noted_fill(tokens: torch.Tensor, window: Window) -> None:
        filled.append(tokens.numel())
        fill(tokens, window)

    monkeypatch.setattr(one, "forward", noted)
    monkeypatch.setattr(one, "fill", noted_fill)
    checked(one, Plain, place)
    most = place.rows_most * (draft_len + 1)
    for rows, width in checked_tokens:
        assert rows * width <= most or rows == 1
    assert max(filled) <= pass_tokens
    assert len(wide) == place.rows_most, "every row is tried"


class NoNumbers(Plain):
    def enter(self, window: Window) -> Attend:
        attend = super().enter(window)
        return lambda *arguments: attend(*arguments) * torch.nan


def test_not_a_number_is_a_mistake_and_stays_nowhere() -> None:
    one = paged(uneven_model("qwen3"), True)
    with pytest.raises(NotInPlace, match="logits differ"):
        checked(one, NoNumbers, PLACE)
    assert any(layer.isnan().any() for layer in one._cache._layers), "later layers' KV"
    assert quickest(one, {"none": NoNumbers}, PLACE) == GATHER
    assert all(layer.isfinite().all() for layer in one._cache._layers)


@pytest.mark.parametrize("rows_most", [1, 4])
@pytest.mark.parametrize(("blocks", "context_len"), [(2, 6), (1, 2), (3, 12), (64, 256)])
def test_the_smallest_caches_are_tried_and_timed_as_well(
    blocks: int, context_len: int, rows_most: int
) -> None:
    shape = replace(SHAPE, context_len=context_len)
    place = Place(blocks, shape, rows_most, draft_len=4, pass_tokens=64, fixed_shapes=False)
    one = model(True)
    in_place = checked(one, Plain, place)
    assert isinstance(in_place, Plain)
    assert in_place.passes > 0
    assert all(seconds > 0 for seconds in measured(one, place))
    one.attend(None)


# --------------------------------------------------------------------------- falling back


def refuses() -> InPlace:
    raise NotInPlace("not on this device")


class Fails(Plain):
    def enter(self, window: Window) -> Attend:
        raise RuntimeError("no kernel image is available")


def test_of_those_that_compute_the_same_the_fastest_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = model(True)
    seconds = {Plain: 1.0, type(None): 2.0}
    monkeypatch.setattr(attention, "measured", lambda m, p: [seconds[type(m._in_place)]])
    makes: dict[str, Callable[[], InPlace]] = {
        "refuses": refuses,
        "fails": Fails,
        "differs": lambda: Plain(MISTAKES["one position too many"]),
        "good": Plain,
    }
    assert quickest(one, makes, PLACE) == "good"
    assert isinstance(one._in_place, Plain)
    seconds[Plain] = 3.0
    assert quickest(one, makes, PLACE) == GATHER
    assert one._in_place is None


def test_an_attention_asked_for_by_name_is_refused_where_it_is_not_to_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PairRefused, match=r"target: attention 'varlen' is not.*GPU"):
        tiny_replica("qwen3", attention="varlen")
    for broken, message in ((Fails, "no kernel image"), (refuses, "not on this device")):
        monkeypatch.setattr(attention, "FlexInPlace", lambda *a, broken=broken: broken())
        with pytest.raises(PairRefused, match=message):
            tiny_replica("qwen3", attention="flex")


def test_a_cpu_gathers_unless_told_otherwise() -> None:
    assert tiny_replica("qwen3").attention == {"target": GATHER, "draft": GATHER}
    with pytest.raises(ValidationError, match="deterministic output needs"):
        ReplicaConfig(deterministic=True, attention="flex")


# --------------------------------------------------------------------------- whole replicas


@cache
def requests() -> list[Request]:
    return mixed_requests(VOCAB, 6, seed=31, new=(2, 7, 12))


@cache
def gathered(architecture: str) -> list[list[int]]:
    outputs = run_staggered(tiny_replica(architecture), sampled(requests()), 3, 3)
    return [output.tokens for output in outputs]


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("qwen3", {}),
        ("qwen3", {"graphs": "on"}),
        ("glm4", {"fuse_layers": False}),
        ("llama", {"prefill_chunk_tokens": 5, "graphs": "on"}),
    ],
)
def test_tokens_are_those_of_gathering(architecture: str, config: dict[str, object]) -> None:
    replica = tiny_replica(architecture, attention=FLEX, kv_blocks=160, **config)
    assert replica.attention == {"target": FLEX, "draft": FLEX}
    assert replica.spec.attention == FLEX
    outputs = run_staggered(replica, sampled(requests()), 3, 3)
    assert [output.tokens for output in outputs] == gathered(architecture)


def test_tokens_are_those_of_gathering_where_drafts_are_trimmed() -> None:
    trimming = Trimming(tiny_replica("qwen3", attention=FLEX, kv_blocks=160), None)
    outputs = LocalEngine(trimming, SchedulerConfig(rows_max=3, draft_len=3)).generate(
        sampled(requests())
    )
    assert [output.tokens for output in outputs] == gathered("qwen3")


@torch.inference_mode()
def test_prefill_gathers_where_each_of_its_shapes_would_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = model(True)
    in_place = checked(one, Plain, PLACE)
    assert isinstance(in_place, Plain)
    before = in_place.passes
    monkeypatch.setattr(in_place, "fills", False, raising=False)
    table = torch.arange(1, 9).view(1, 8)
    window = attention.Layout(table, [0], 7, SHAPE).window(0, 7)
    one.fill(torch.ones((1, 7), dtype=torch.int64), window)
    assert in_place.passes == before
    one.forward(torch.ones((1, 7), dtype=torch.int64), window)
    assert in_place.passes == before + 1
    one.attend(None)


def test_where_gathering_cannot_be_timed_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cannot be recorded runs unrecorded, so that is no reason to refuse it."""

    def cannot(model: PagedModel, place: Place) -> list[float]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(attention, "measured", cannot)
    one = model(True)
    assert quickest(one, {"good": Plain}, PLACE) == GATHER
    assert one._in_place is None
