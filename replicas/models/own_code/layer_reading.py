"""Reads from a model, once, what the attention of each of its layers needs.

The model's own forward pass runs on tensors without storage, with an attention and a mask that
only note what they are asked for. So no family is known by its name: widths are those of the
queries, keys and values that a layer brings, windows and chunks those of the masks that it is
given. What cannot be described is refused in a sentence.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from replicas.errors import PairRefused
from replicas.kv_cache import LayerShape
from replicas.models.own_code.own_attention import attend_by_interface

READING = "lockstep_reading"
ATTENTION = "lockstep_paged"
OURS = frozenset({READING, ATTENTION})
"""Implementations of attention by which a model notes what it needs, and computes over a cache."""
_TOKENS = 6
_KNOWN = frozenset({"softcap", "s_aux", "sliding_window", "dropout", "is_causal"})
_UNSERVED = {
    "position_bias": "a bias by distance",
    "alibi": "a bias by distance",
    "indices": "a choice of positions by an index",
}
"""Arguments by which a layer asks for another attention, and what they mean."""
_POSITIONS = 1 << 17
"""Positions up to which a mask is looked at."""

_READ = "lockstep_layers"
_CACHES = {"past_key_values", "cache_params"}
"""Arguments by which a model's forward pass takes a cache; one without attends over its tokens."""
_STATES = (
    "some layers carry a state from token to token, or cache other data than keys and values; only"
    " attention over keys and values is served"
)


class NotDescribed(Exception):
    """A layer's attention is none that is served; the message says what it needs."""


@dataclass(slots=True)
class _Notes:
    layers: list[LayerShape] = field(default_factory=list)
    read: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Keys and values of each layer of the cache: all that attention was given, each once."""
    updates: int = 0
    """How often the model's code gave keys and values to a cache."""


_log = logging.getLogger("lockstep.replica")

_NOTES: list[_Notes] = []
"""The reading that runs now; one at a time."""


def layers_of(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What each layer needs, in the order in which they attend; of a rank's part, what is there.
    Raises PairRefused."""
    found: tuple[LayerShape, ...] | None = getattr(model, _READ, None)
    if found is None:
        found = read_layers(model)
        setattr(model, _READ, found)
    return found


def read_layers(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """The same, read anew."""
    name, notes = type(model).__name__, _Notes()
    attend_by_interface(model, OURS)
    tensors = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }
    tokens = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    positions = torch.arange(_TOKENS, device="meta")[None]
    arguments = {
        "input_ids": tokens,
        "position_ids": positions,
        "past_key_values": _NotingCache(notes),
        "use_cache": True,
    }
    if chooses_logits(model):  # a number would have some families leave out tokens
        arguments["logits_to_keep"] = torch.arange(_TOKENS, device="meta")
    _NOTES.append(notes)
    try:
        with (
            computing_by(model, READING, READING),
            _NothingPadded(in_masks=False),
            torch.inference_mode(),
        ):
            functional_call(model, tensors, (), arguments, tie_weights=False)
    except NotDescribed as reason:
        raise PairRefused(f"{name} is not served: {reason}") from None
    except Exception as error:  # of a model's own code
        _log.debug("%s", name, exc_info=True)
        raise PairRefused(
            f"{name} is not served: its code needs a cache of its own kind, or fails with a paged"
            " one"
        ) from error
    finally:
        _NOTES.remove(notes)
    known = inspect.signature(type(model).forward).parameters
    takes_cache = bool(known.keys() & _CACHES) or (
        # A forward pass around another one: that attends as it was asked to.
        bool(notes.layers) and any(each.kind is each.VAR_KEYWORD for each in known.values())
    )
    if len(notes.layers) < notes.updates or not takes_cache:
        raise PairRefused(
            f"{name} is not served: its own code for attention cannot compute several requests in"
            " one pass"
        )
    if len(notes.layers) < model.config.get_text_config().num_hidden_layers:
        raise PairRefused(f"{name} is not served: {_STATES}")
    return tuple(notes.layers)


def chooses_logits(model: PreTrainedModel) -> bool:
    """Whether it can be told of which tokens logits are wanted."""
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters


Implementations = list[tuple[Any, str, Any]]
"""Configs, their attributes and the values of these."""


def compute_by(model: nn.Module, attention: str, experts: str) -> Implementations:
    """Let the model compute attention and experts by these implementations of transformers'
    interfaces. Returns what was set before."""
    wanted = (
        ("_attn_implementation_internal", attention),
        ("_experts_implementation_internal", experts),
    )
    configs = {
        id(config): config
        for module in model.modules()
        if (config := getattr(module, "config", None)) is not None
    }
    before = []
    for config in configs.values():
        for name, value in wanted:
            before.append((config, name, getattr(config, name, None)))
            setattr(config, name, value)
    return before


@contextmanager
def computing_by(model: nn.Module, attention: str, experts: str) -> Iterator[None]:
    """`compute_by` for a while."""
    before = compute_by(model, attention, experts)
    try:
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


class _NotingCache:
    """transformers' cache interface; notes what is stored."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._notes.updates += 1
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, length: int, *_: Any) -> tuple[int, int]:
        return length, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotDescribed(_STATES)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Which positions before its own a query sees."""

    window: int | None = None
    chunk: int | None = None
    otherwise: bool = False
    """In a way that has no description here."""


_SEEN = "lockstep_seen"


def _noting_mask(
    q_length: int, kv_length: int, mask_function: Callable[..., Any], **more: Any
) -> torch.Tensor:
    """A mask of no content, which carries what it means."""
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    setattr(mask, _SEEN, _seen(mask_function, more.get("local_size")))
    return mask


class _NothingPadded(TorchFunctionMode):
    """Models look for padding among tokens that have no value here: there is none."""

    def __init__(self, *, in_masks: bool) -> None:
        """`in_masks`: what is looked up is how much of a row is padding."""
        super().__init__()
        self._in_masks = in_masks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__contains__ and args[0].is_meta:
            return False
        if self._in_masks and func is torch.Tensor.__getitem__ and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))


def _seen(mask_function: Callable[..., Any], size: int | None) -> _Seen:
    """Looks at the positions around those where a window or a chunk of this size would end."""
    sizes = [0, 1, 2, 3, 5, 8]
    if size is not None:
        if size < 1:
            return _Seen(otherwise=True)
        sizes += [place for n in (1, 2, 3) for place in range(n * size - 2, n * size + 3)]
    places = torch.tensor(sorted({place for place in sizes if 0 <= place < _POSITIONS}))
    query, key = places[:, None], places[None]
    zero = torch.zeros((), dtype=torch.int64)
    with _NothingPadded(in_masks=True):
        seen = mask_function(zero, zero, query, key)
    causal = key <= query
    forms = [(_Seen(), causal)]
    if size is not None:
        forms.append((_Seen(window=size), causal & (key > query - size)))
        forms.append((_Seen(chunk=size), causal & (key // size == query // size)))
    for form, expected in forms:
        if torch.equal(torch.as_tensor(seen).expand_as(expected), expected):
            return form
    return _Seen(otherwise=True)


def _noting_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,  # [1, kv_heads, tokens, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [1, tokens, heads, value_dim]
    notes = _NOTES[-1]
    for name, meaning in _UNSERVED.items():
        if kwargs.get(name) is not None:
            raise NotDescribed(f"its attention needs {meaning}")
    if query.shape[2] != _TOKENS or kwargs.get("is_causal") is False:
        raise NotDescribed("its attention does not go from left to right over a row's tokens")
    if key.shape[2] != _TOKENS:
        raise NotDescribed("its attention reads keys that are no token's")
    pairs = enumerate(notes.read)
    store = next((at for at, (keys, values) in pairs if keys is key and values is value), None)
    if store is None:
        store = len(notes.read)
        notes.read.append((key, value))
    seen: _Seen = getattr(attention_mask, _SEEN, _Seen(otherwise=True))
    if seen == _Seen() and kwargs.get("own_window") is not None:
        seen = _Seen(window=kwargs["own_window"])
    if seen.otherwise:
        raise NotDescribed(
            "its attention mask is no causal mask over all positions, a window or a chunk"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % kv_heads:
        raise NotDescribed(f"{heads} query heads share {kv_heads} KV heads unevenly")
    notes.layers.append(
        LayerShape(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            window=seen.window,
            chunk=seen.chunk,
            soft_cap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux") is not None,
            store=store,
        )
    )
    return query.new_empty((1, _TOKENS, heads, value.shape[3])), None


def _noting_experts(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(hidden_states)


AttentionInterface.register(READING, _noting_attention)
AttentionMaskInterface.register(READING, _noting_mask)
ALL_EXPERTS_FUNCTIONS.register(READING, _noting_experts)
