"""One transformers model run over a paged KV cache.

The model is plugged in twice: the cache through `past_key_values`, the attention through
transformers' attention interface. Nothing else of a model is touched, so any decoder-only model
with full attention works. Llama-like ones run faster with joined layers (`replicas.fused`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from replicas.fused import TOLERANCE, FusedDecoder, NotFused
from replicas.in_place import Attend, InPlace
from replicas.paged_cache import PagedCache
from replicas.windows import CacheShape, Layout, Window

ATTENTION = "lockstep_paged"

_OTHER_MATHS = frozenset({"softcap", "s_aux", "position_bias", "sinks"})
"""Arguments by which models ask the interface for another function than softmax(QK)V."""


_TRIAL_TOKENS = 8

Attention = Callable[..., tuple[torch.Tensor, None]]


class UnsupportedAttention(ValueError):
    """Serving the model would silently compute something else than the model does."""


def refuse_other_maths(arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedAttention when a model asks for more than plain softmax attention."""
    for name in _OTHER_MATHS & arguments.keys():
        if arguments[name] is not None:
            raise UnsupportedAttention(f"the model's attention needs {name!r}, which is not served")


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,  # [rows, heads, width, head_dim]
    key: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    value: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    attention_mask: torch.Tensor | None,  # [rows or 1, 1, width, length], 0 or -inf
    scaling: float | None = None,
    in_place: Attend | None = None,
    folded_mask: torch.Tensor | None = None,
    causal: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [rows, width, heads, head_dim]
    """Attention for transformers' interface; query heads that share a KV head become its rows.

    Folding the query group into the width spares a repeated copy of keys and values; the mask may
    come folded. In place keys and values are the whole cache, which is read by `in_place`. `causal`
    ones are the queries' own, so there is no mask.
    """
    refuse_other_maths(kwargs)
    if in_place is not None:
        return in_place(query, key, value, scaling), None
    if causal:
        out = scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2), None
    rows, heads, width, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if group > 1:
        query = query.reshape(rows, kv_heads, group * width, dim)
        if folded_mask is not None:
            attention_mask = folded_mask
        elif attention_mask is not None and width > 1:
            masks, _, _, length = attention_mask.shape
            attention_mask = attention_mask.expand(masks, group, width, length).reshape(
                masks, 1, group * width, length
            )
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=False
    )
    return out.reshape(rows, heads, width, value.shape[-1]).transpose(1, 2), None


def register_attention(name: str, attention: Attention) -> None:
    """Make an attention function known to transformers; it may rely on getting whole rows.

    Of a packed window transformers knows one row, so its queries are put into the grid of rows
    before, and taken out of it after.
    """

    def over_grid(
        module: nn.Module,
        query: torch.Tensor,  # [rows, heads, width, head_dim], or [1, heads, tokens, head_dim]
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_window: Window | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # [rows, width, heads, head_dim], or [1, tokens, ...]
        if packed_window is None:
            return attention(module, query, key, value, attention_mask, **kwargs)
        cells = packed_window.unpack(query[0].transpose(0, 1))
        shape = (packed_window.rows, packed_window.width, *cells.shape[1:])
        grid = cells.view(shape).transpose(1, 2)
        out, _ = attention(module, grid, key, value, attention_mask, **kwargs)
        return packed_window.pack(out.flatten(0, 1))[None], None

    AttentionInterface.register(name, over_grid)


register_attention(ATTENTION, paged_attention)


def alike(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for what another order of the same sums may make; never with NaN."""
    difference = (logits - expected).abs().max()
    return bool(difference <= TOLERANCE[expected.dtype] * expected.abs().max())


class PagedModel:
    """A causal language model and its own paged KV cache."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        self._fused: FusedDecoder | None = None
        self._in_place: InPlace | None = None
        self.packs = False
        """Whether it takes packed windows; a model may keep from its attention what they need."""
        self.vocab = int(model.config.vocab_size)
        """Rows of the embedding, its padding included: logits have this many."""
        # The model's own property looks through its modules for a parameter, every time.
        self.device: torch.device = model.device

    @property
    def fused(self) -> bool:
        """Whether the forward pass is the fused one rather than the model's own."""
        return self._fused is not None

    @property
    def in_parts(self) -> bool:
        """Whether it reads the parts of a window one by one; else it reads all rows as one."""
        return self._fused is not None and self._in_place is None and self.device.type == "cpu"

    @property
    def part_positions(self) -> int | None:
        """KV positions whose reading takes about as long as reading a window in one more part;
        None: it reads all rows as one."""
        return self._cache.part_positions if self.in_parts else None

    def attend(self, in_place: InPlace | None) -> None:
        """Read keys and values in place from now on; None gathers them. Nothing is checked."""
        self._in_place = in_place

    def clear(self) -> None:
        """Make the whole KV cache 0, as it was at first."""
        self._cache.clear()

    @torch.inference_mode()
    def try_out(self, shape: CacheShape, fuse: bool, pack: bool = False) -> None:
        """One forward pass on the scrap block; raises what the model's own forward raises.

        With `fuse` the model's layers are joined from then on, if it is of that make and its logits
        are the same but for rounding; with `pack` their weights are laid out for a CPU as well.
        """
        device = self._model.device
        width = min(shape.block_size, shape.context_len, _TRIAL_TOKENS)
        table = torch.zeros((1, 1), dtype=torch.int64, device=device)
        tokens = torch.arange(1, width + 1, device=device)[None] % self.vocab
        window = Layout(table, [0], width, shape).window(0, width)
        expected = self.forward(tokens, window)
        if fuse:
            try:
                batch = self._model.config._attn_implementation == ATTENTION
                self._fused = FusedDecoder(self._model, self._cache, shape.context_len, pack, batch)
            except NotFused:
                pass
            else:
                if not alike(self.forward(tokens, window), expected):
                    self._fused = None
        backwards = torch.arange(width - 1, -1, -1, device=device)
        try:
            packed = self.forward(tokens[:, backwards], window.packed(backwards))
        except (TypeError, ValueError, RuntimeError):
            return
        self.packs = alike(packed[:, backwards], expected)

    def forward(
        self,
        tokens: torch.Tensor,  # [rows, width], or [1, tokens] where the window is packed; int64
        window: Window,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:  # [rows, width or logits_to_keep, vocab]
        """Logits of the window's positions; their KV entries are written on the way."""
        return self._forward(tokens, window, logits_to_keep, self._in_place)

    def fill(
        self,
        tokens: torch.Tensor,  # [rows, width], int64
        window: Window,
    ) -> None:
        """Write the KV entries of a prefill window, which may be of any shape."""
        in_place = self._in_place
        if in_place is not None and not in_place.fills:
            in_place = None
        if self._fused is None:
            # One position's logits are the least that such a model computes.
            self._forward(tokens, window, 1, in_place)
        else:
            self._fused.fill(tokens, window, self._enter(window, in_place))

    def _enter(self, window: Window, in_place: InPlace | None) -> Attend | None:
        self._cache.enter(window, in_place is not None)
        return None if in_place is None else in_place.enter(window)

    def _forward(
        self,
        tokens: torch.Tensor,
        window: Window,
        logits_to_keep: int,
        in_place: InPlace | None,
    ) -> torch.Tensor:
        attend = self._enter(window, in_place)
        if self._fused is not None:
            return self._fused.forward(tokens, window, logits_to_keep, attend)
        further: dict[str, Any] = {}
        if window.cells is not None:
            further["packed_window"] = window
        if attend is not None:
            further["in_place"] = attend
        out = self._model(
            input_ids=tokens,
            attention_mask=window.mask,
            position_ids=window.positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **further,
        )
        logits: torch.Tensor = out.logits
        return logits
