"""One transformers model run over a paged KV cache.

The model is plugged in by transformers' attention interface: what a layer attends over is stored
there, and read as the layer's description says (`layer_reading`). Nothing else of a model is
touched. Llama-like ones run faster with joined layers (`decoder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from replicas.invariant import Arithmetic
from replicas.kv_cache import PagedCache, TokenRange, divided_into_passes
from replicas.models.decoder import JoinedDecoder, LayerAttention
from replicas.models.own_code.current_pass import PASS, BatchLayout, CurrentPass
from replicas.models.own_code.experts import EXPERTS, ON_DEVICE
from replicas.models.own_code.layer_reading import ATTENTION, chooses_logits, compute_by
from replicas.transfers import upload

ERROR_FLOOR = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""An error that is always accepted, as a share of the largest logit: the noise of a few tokens."""


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

    def begin(self, layout: Any) -> LayerAttention:
        """What all layers of one pass share."""
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
        compute_by(model, ATTENTION, EXPERTS if model.device.type == "cpu" else ON_DEVICE)
        self._chooses_logits = chooses_logits(model)
        firsts = {needs.store: layer for layer, needs in reversed([*enumerate(cache.needs)])}
        self._writers = frozenset(firsts.values())

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
            logits, hidden = self._own(tokens, count, layout, kept, options.aux_layers)
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
        attention = self.backend.begin(layout)
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
        count: int,
        layout: BatchLayout,
        kept: torch.Tensor | bool,
        aux_layers: tuple[int, ...],
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        arguments: dict[str, Any] = {"output_hidden_states": True} if aux_layers else {}
        if self._chooses_logits:
            # One position's logits are the least that such a model computes.
            chosen = tokens.new_zeros(1) if kept is False else kept
            arguments["logits_to_keep"] = 0 if chosen is True else chosen
        layers = int(self.model.config.get_text_config().num_hidden_layers)
        attention = self.backend.begin(layout)
        current = CurrentPass(self.cache, layout, attention, self._writers, count)
        reset = PASS.set(current)
        try:
            with _last_layer(self.model, listen=layers in aux_layers) as last:
                out = self.model(
                    input_ids=tokens[None],
                    position_ids=layout.positions[None],
                    past_key_values=_CacheDoor(),
                    use_cache=True,
                    **arguments,
                )
        finally:
            PASS.reset(reset)
        hidden = [
            last[0] if number == layers else out.hidden_states[number][0] for number in aux_layers
        ]
        if kept is False:
            return None, hidden
        logits = out.logits[0]
        if isinstance(kept, torch.Tensor) and not self._chooses_logits:
            logits = logits.index_select(0, kept)
        return logits, hidden


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


class _CacheDoor:
    """transformers' cache interface, as far as decoders use it. Keys and values go into the paged
    cache where attention gets them."""

    is_compileable = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        """What a model takes from it, its positions and masks, it is given otherwise."""
        return 0


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,  # [1, kv_heads, tokens, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [1, tokens, heads, value_dim]
    """Attention for transformers' interface, by the current pass over the paged cache. What it
    needs beside these is in the cache's description of the layer."""
    current = PASS.get()
    assert current is not None, "paged attention runs within a pass"
    layer, current.layer = current.layer, current.layer + 1
    needs = current.cache.needs[layer]
    if layer in current.writers:
        both = torch.stack([_widened(states[0], needs.width) for states in (key, value)])
        fresh = both.permute(2, 0, 1, 3).contiguous()  # [tokens, 2, kv_heads, width]
        current.cache.write(needs.store, current.layout.slots, fresh)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries = query[0].transpose(0, 1)
    out = current.attention(layer, queries, scale, s_aux)
    return out.view(1, queries.shape[0], needs.heads, needs.value_dim), None


def _widened(states: torch.Tensor, width: int) -> torch.Tensor:  # [.., own] -> [.., width]
    return states if states.shape[-1] == width else pad(states, (0, width - states.shape[-1]))


AttentionInterface.register(ATTENTION, paged_attention)


def prefill(
    model: Model,
    contents: Sequence[Sequence[int]],
    ranges: Sequence[TokenRange],
    table: torch.Tensor,  # [rows, blocks], int64
    pass_tokens: int,
) -> None:
    """Write KV for the tokens of each row's range, in passes of at most so many tokens."""
    for one_pass in divided_into_passes(ranges, pass_tokens):
        fill(model, contents, one_pass, table[[row for row, _ in one_pass]])


def fill(
    model: Model,
    contents: Sequence[Sequence[int]],
    one_pass: Sequence[tuple[int, TokenRange]],
    table: torch.Tensor,  # [rows of the pass, blocks] or with groups between, int64
    options: ForwardOptions = NONE,
) -> Output:
    """Write KV for ranges of some rows, in one pass."""
    # An id that only the target has, padding of its embedding, is fed as the last one.
    last = model.vocab - 1
    fed = [min(token, last) for row, (begin, end) in one_pass for token in contents[row][begin:end]]
    layout = model.backend.ranges_layout(table, [part for _, part in one_pass])
    return model.forward(upload(fed, torch.int64, table.device), layout, options)
