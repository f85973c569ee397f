"""One transformers model run over a paged KV cache.

The model is plugged in twice: the cache through `past_key_values`, the attention through
transformers' attention interface. Nothing else of a model is touched, so any decoder-only model
with full attention works. Llama-like ones run faster with joined layers (`decoder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from replicas.errors import PairRefused
from replicas.invariant import Arithmetic, PassLayout
from replicas.kv_cache import DevicePassLayout, PagedCache, TokenRange, divided_into_passes
from replicas.models.decoder import JoinedDecoder, LayerAttention
from replicas.transfers import upload

ATTENTION = "lockstep_paged"

_OTHER_MATHS = frozenset({"softcap", "s_aux", "position_bias", "sinks"})
"""Arguments by which models ask the interface for another function than softmax(QK)V."""

ERROR_FLOOR = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""An error that is always accepted, as a share of the largest logit: the noise of a few tokens."""


BatchLayout = PassLayout | DevicePassLayout
"""Where a pass reads and writes, on a CPU and on a device."""


class AttentionBackend(Protocol):
    """One way to attend over a paged cache, with the index arithmetic that it needs."""

    name: str
    cache: PagedCache

    def step_layout(self, table: torch.Tensor, starts: Sequence[int], width: int) -> Any:
        """The passes over `width` positions from each row's start on, which may be -1.

        It has `positions`, [rows, width], and `window(begin, end)`, the pass over some columns of
        all rows, row by row.
        """
        ...

    def ranges_layout(self, table: torch.Tensor, ranges: Sequence[TokenRange]) -> BatchLayout:
        """The pass over positions [begin, end) of each row, row by row."""
        ...

    def begin(self, layout: Any, stride: int) -> LayerAttention:
        """What all layers of one pass share; `stride` vectors per token are brought."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """What a forward pass shall return."""

    logits: torch.Tensor | bool = True
    """Of which tokens, [n], int64; True: of all; False: of none."""
    aux_layers: tuple[int, ...] = ()
    """Hidden states after so many layers, as transformers counts them (0: the embedding), but that
    those after the last layer have not passed the last norm."""


ALL = ForwardOptions()
NONE = ForwardOptions(logits=False)


@dataclass(slots=True)
class Output:
    logits: torch.Tensor | None  # [n, vocab]
    aux_hidden_states: list[torch.Tensor] = field(default_factory=list)  # each [tokens, hidden]


class Model(Protocol):
    """What runs forward passes: a `PagedModel`, one whose passes have fixed shapes, or a head,
    which takes hidden states beside tokens."""

    backend: AttentionBackend
    device: torch.device
    vocab: int

    @property
    def forward(self) -> Callable[..., Output]:
        """(tokens, layout, options, *hidden)."""
        ...


class PagedModel:
    """A causal language model and its own paged KV cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        backend: AttentionBackend,
        arithmetic: Arithmetic,
        decoder: JoinedDecoder | None = None,
    ) -> None:
        """`decoder`: the joined layers that take the place of the model's own forward pass."""
        self.model = model
        self.cache = cache
        self.backend = backend
        self.arithmetic = arithmetic
        self.decoder = decoder
        self.vocab = int(model.config.vocab_size)
        """Rows of the embedding, its padding included: logits have this many."""
        # The model's own property looks through its modules for a parameter, every time.
        self.device: torch.device = model.device

    def forward(
        self,
        tokens: torch.Tensor,  # [tokens], int64
        layout: BatchLayout,
        options: ForwardOptions = ALL,
    ) -> Output:
        """The logits and hidden states wanted; KV entries of all tokens are written on the way."""
        count, padded = tokens.shape[0], layout.positions.shape[0]
        if padded > count:
            tokens = pad(tokens, (0, padded - count))
        kept, rows = options.logits, count
        if isinstance(kept, torch.Tensor):
            rows = kept.shape[0]
            kept = pad(kept, (0, self.arithmetic.padded(rows) - rows))
        if self.decoder is None:
            logits, hidden = self._own(tokens, layout, kept, options.aux_layers)
        else:
            logits, hidden = self._joined(self.decoder, tokens, layout, kept, options.aux_layers)
        hidden = [states[:count] for states in hidden]
        return Output(None if logits is None else logits[:rows], hidden)

    def _joined(
        self,
        decoder: JoinedDecoder,
        tokens: torch.Tensor,
        layout: BatchLayout,
        kept: torch.Tensor | bool,
        aux_layers: tuple[int, ...],
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        kv_only = kept is False
        attention = self.backend.begin(layout, decoder.stride)
        x, hidden = decoder.forward(
            tokens, layout.positions, layout.slots, attention, aux_layers, kv_only
        )
        if kv_only:
            return None, hidden
        if isinstance(kept, torch.Tensor):
            x = x.index_select(0, kept)
        return decoder.logits(x), hidden

    def _own(
        self,
        tokens: torch.Tensor,
        layout: BatchLayout,
        kept: torch.Tensor | bool,
        aux_layers: tuple[int, ...],
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        config = self.model.config
        heads = int(config.num_attention_heads)
        reset = _PASS.set(_Pass(self.cache, layout, self.backend.begin(layout, heads)))
        layers = int(config.num_hidden_layers)
        try:
            with _last_layer(self.model, listen=layers in aux_layers) as last:
                out = self.model(
                    input_ids=tokens[None],
                    position_ids=layout.positions[None],
                    past_key_values=_CacheDoor(self.cache),
                    use_cache=True,
                    # One position's logits are the least that such a model computes.
                    logits_to_keep=1 if kept is False else 0 if kept is True else kept,
                    output_hidden_states=bool(aux_layers),
                )
        finally:
            _PASS.reset(reset)
        hidden = [
            last[0] if number == layers else out.hidden_states[number][0] for number in aux_layers
        ]
        return (None if kept is False else out.logits[0]), hidden


@contextmanager
def _last_layer(model: PreTrainedModel, listen: bool) -> Iterator[list[torch.Tensor]]:
    """What the last layer puts out, [tokens, hidden]: transformers' own has passed the norm."""
    heard: list[torch.Tensor] = []
    if not listen:
        yield heard
        return

    def hear(layer: nn.Module, inputs: Any, states: Any) -> None:
        heard.append((states[0] if isinstance(states, tuple) else states).flatten(0, -2))

    last: Any = model.base_model.layers
    hook = last[-1].register_forward_hook(hear)
    try:
        yield heard
    finally:
        hook.remove()


# --------------------------------------------------------------------------- transformers' doors


@dataclass(slots=True)
class _Pass:
    """The forward pass of a model's own that runs now."""

    cache: PagedCache
    layout: BatchLayout
    attention: LayerAttention
    layer: int = 0


_PASS: ContextVar[_Pass | None] = ContextVar("lockstep_pass", default=None)


class _CacheDoor:
    """transformers' cache interface, as far as decoders use it."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def update(
        self,
        key_states: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
        value_states: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new positions; what is returned is only passed on to `paged_attention`."""
        current = _PASS.get()
        assert current is not None, "the cache is used outside of a forward pass"
        current.layer = layer_idx
        both = torch.stack((key_states[0], value_states[0]))  # [2, kv_heads, tokens, head_dim]
        self._cache.write(layer_idx, current.layout.slots, both.permute(2, 0, 1, 3).contiguous())
        return key_states, value_states


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [1, tokens, heads, head_dim]
    """Attention for transformers' interface: by the current pass over the paged cache, or without
    one plainly, over the keys that are given, the last of which are the tokens' own."""
    for name in _OTHER_MATHS & kwargs.keys():
        if kwargs[name] is not None:
            raise PairRefused(f"the model's attention needs {name!r}, which is not served")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    current = _PASS.get()
    if current is None:
        return plain_attention(query, key, value, scale), None
    queries = query[0].transpose(0, 1)
    out = current.attention(current.layer, queries, scale)
    return out.view(1, *queries.shape), None


def plain_attention(
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, keys, head_dim]
    value: torch.Tensor,  # [1, kv_heads, keys, head_dim]
    scale: float,
) -> torch.Tensor:  # [1, tokens, heads, head_dim]
    """Over the keys that are given, the last of which are the tokens' own."""
    heads, tokens = query.shape[1:3]
    key, value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    keys = key.shape[2]
    hidden = torch.full((tokens, keys), -torch.inf, dtype=query.dtype, device=query.device)
    scores = query @ key.transpose(2, 3) * scale + hidden.triu(1 + keys - tokens)
    return (scores.softmax(-1) @ value).transpose(1, 2)


AttentionInterface.register(ATTENTION, paged_attention)


OnPass = Callable[[list[int], list[TokenRange], Output], None]
"""Told after each pass: which rows, what of each was computed, and what was wanted of it."""


def prefill(
    model: Model,
    contents: Sequence[Sequence[int]],
    ranges: Sequence[TokenRange],
    table: torch.Tensor,  # [rows, blocks], int64
    pass_tokens: int,
    options: ForwardOptions = NONE,
    on_pass: OnPass | None = None,
) -> None:
    """Write KV for the tokens of each row's range, in passes of at most so many tokens."""
    for one_pass in divided_into_passes(ranges, pass_tokens):
        rows = [row for row, _ in one_pass]
        parts = [part for _, part in one_pass]
        # An id that only the target has, padding of its embedding, is fed as the last one.
        last = model.vocab - 1
        fed = [
            min(token, last) for row, (begin, end) in one_pass for token in contents[row][begin:end]
        ]
        layout = model.backend.ranges_layout(table[rows], parts)
        out = model.forward(upload(fed, torch.int64, table.device), layout, options)
        if on_pass is not None:
            on_pass(rows, parts, out)
