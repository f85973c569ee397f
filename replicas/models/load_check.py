"""The check of a loaded model: it must give each row what it gives that row alone.

Rows of different lengths share passes, their blocks lie out of order, a prompt comes in two chunks,
steps have five tokens and one. Every row's logits are held against the model's own forward pass
over that row alone, by transformers' own attention, masks and experts, on the noise floors of
`verify`: the error of both is measured against a finer dtype. Windows are made short enough for a
few tokens to reach beyond them. Where the arithmetic is proven, the logits must also have the bits
that a row gets alone, in one piece. Parts of a model on several ranks must give together what the
whole model gave before it was divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from replicas.errors import PairRefused
from replicas.kv_cache import CacheShape, LayerShape
from replicas.models.own_code.layer_reading import layers_of, read_layers
from replicas.models.paged_model import ERROR_FLOOR, PagedModel
from replicas.models.reference import FINER, own_logits

ERROR_RATIO_MOST = 4.0
"""A pass over the cache may be so many times as far from the truth as the model's own."""
_WINDOW = 6
"""Positions of windows and chunks while a model is checked, where they have more."""
_PARTS = ((9, 6, 5, 1), (3, 0, 5, 1), (1, 1, 5, 1))
"""Tokens of each row in the passes: a prompt's chunks, a step of five tokens, one of one."""
_STEPS_FROM = 2
_WHOLE, _WHOLE_TOKENS = "lockstep_whole", 9
"""What a model said before ranks divided it: tokens and logits, of each seed."""
_SEEDS = (0, 1)
"""An error that comes by chance, where two experts are tied, does not come twice."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Rows of a check, and what the model itself says of them."""

    parts: tuple[tuple[int, ...], ...]
    tokens: list[torch.Tensor]  # each [length], int64
    own: list[torch.Tensor]  # each [length, vocab], in the model's dtype
    truth: list[torch.Tensor]  # the same in a finer one


@dataclass(frozen=True, slots=True)
class Finding:
    """How far a way of computing is from the truth."""

    error: float
    own_error: float
    floor: float
    same_bits: bool
    """Whether rows get the same bits alone and among others."""

    @property
    def right(self) -> bool:
        return self.error <= ERROR_RATIO_MOST * self.own_error + self.floor  # not for NaN


class LoadCheck:
    """What a model says by itself, and how ways of computing are held against it."""

    def __init__(self, model: PreTrainedModel, shape: CacheShape, blocks: int) -> None:
        """Before anything is done to the model's layers. Raises PairRefused where they are parts
        that do not fit together."""
        _check_parts(model)
        self._model, self._blocks, self._size = model, blocks, shape.block_size
        self._parts = _parts(shape, blocks)
        self._trials: list[Trial] = []

    @torch.inference_mode()
    def trial(self, number: int) -> Trial:
        """The rows of a seed; each is computed once, while the model's layers are its own."""
        while len(self._trials) <= number:
            self._trials.append(self._tried(_SEEDS[len(self._trials)]))
        return self._trials[number]

    def _tried(self, seed: int) -> Trial:
        model, generator = self._model, torch.Generator().manual_seed(seed)
        vocab = int(model.config.get_text_config().vocab_size)
        tokens = [
            torch.randint(vocab, (sum(parts),), generator=generator).to(model.device)
            for parts in self._parts
        ]
        with short_windows(model):
            own = [own_logits(model, row) for row in tokens]
            truth = [own_logits(model, row, FINER[model.dtype]) for row in tokens]
        return Trial(self._parts, tokens, own, truth)

    @torch.inference_mode()
    def find(self, paged: PagedModel) -> Finding:
        """Run the passes over a cache whose blocks belong to no sequence; it is cleared."""
        finding = None
        for number in range(len(_SEEDS)):
            finding = self._find(paged, self.trial(number))
            if finding.right:
                break
        assert finding is not None
        return finding

    def _find(self, paged: PagedModel, trial: Trial) -> Finding:
        cache, kept = paged.cache, paged.cache.needs
        try:
            with short_windows(self._model) as shortened:
                cache.use(shortened(kept))
                together = self._together(paged, trial)
                same_bits = not paged.arithmetic.proven or all(
                    map(torch.equal, together, self._alone(paged, trial))
                )
        finally:
            cache.use(kept)
            cache.clear()
        error = own_error = floor = 0.0
        for got, own, truth in zip(together, trial.own, trial.truth, strict=True):
            error = _worst(error, got, truth)
            own_error = _worst(own_error, own, truth)
            floor = max(floor, ERROR_FLOOR[self._model.dtype] * float(truth.abs().max()))
        return Finding(error, own_error, floor, same_bits)

    def _table(self, paged: PagedModel) -> torch.Tensor:  # [rows, blocks], int64
        """Blocks in an order that no row could guess."""
        rows = len(self._parts)
        columns = -(-max(map(sum, self._parts)) // self._size)
        order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(2))
        return paged.cache.trial_table(1 + order.view(rows, columns).to(paged.device))

    def _together(self, paged: PagedModel, trial: Trial) -> list[torch.Tensor]:
        table, done = self._table(paged), [0] * len(trial.parts)
        found: list[list[torch.Tensor]] = [[] for _ in trial.parts]
        for number, widths in enumerate(zip(*trial.parts, strict=True)):
            rows = [row for row, width in enumerate(widths) if width]
            if not rows:
                # The context has no room for so many.
                continue
            ranges = [(done[row], done[row] + widths[row]) for row in rows]
            if number >= _STEPS_FROM:
                starts = [begin for begin, _ in ranges]
                width = widths[rows[0]]
                layout = paged.backend.step_layout(table[rows], starts, width).window(0, width)
            else:
                layout = paged.backend.ranges_layout(table[rows], ranges)
            fed = [trial.tokens[row][slice(*part)] for row, part in zip(rows, ranges, strict=True)]
            logits = _logits(paged, torch.cat(fed), layout)
            parts = torch.split(logits, [end - begin for begin, end in ranges])
            for row, part, (_, end) in zip(rows, parts, ranges, strict=True):
                found[row].append(part.clone())
                done[row] = end
        return [torch.cat(parts) for parts in found]

    def _alone(self, paged: PagedModel, trial: Trial) -> Iterator[torch.Tensor]:
        """Each row in one pass, in other blocks."""
        table = self._table(paged).flip(0)
        for row, tokens in enumerate(trial.tokens):
            layout = paged.backend.ranges_layout(table[[row]], [(0, tokens.shape[0])])
            yield _logits(paged, tokens, layout).clone()


@torch.inference_mode()
def remember_whole(model: PreTrainedModel) -> None:
    """Keep what a model says before ranks divide it; the check of their parts needs it."""
    vocab, whole = int(model.config.get_text_config().vocab_size), []
    for seed in _SEEDS:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocab, (_WHOLE_TOKENS,), generator=generator)
        whole.append((tokens, own_logits(model, tokens.to(model.device))))
    setattr(model, _WHOLE, whole)


@torch.inference_mode()
def _check_parts(model: PreTrainedModel) -> None:
    findings = []
    for tokens, whole in getattr(model, _WHOLE, ()):
        row = tokens.to(model.device)
        own, truth = own_logits(model, row), own_logits(model, row, FINER[model.dtype])
        floor = ERROR_FLOOR[model.dtype] * float(truth.abs().max())
        error = _worst(0.0, whole.to(model.device), truth)
        findings.append(Finding(error, _worst(0.0, own, truth), floor, same_bits=True))
    if findings and not any(finding.right for finding in findings):
        raise PairRefused(
            f"{type(model).__name__} is not served: its parts on several devices do not give"
            f" together what the whole model gives (off by {findings[0].error:.1e}, its own"
            f" rounding is {findings[0].own_error:.1e})"
        )


def _logits(paged: PagedModel, tokens: torch.Tensor, layout: Any) -> torch.Tensor:
    logits = paged.forward(tokens, layout).logits
    assert logits is not None
    return logits


def _worst(error: float, got: torch.Tensor, truth: torch.Tensor) -> float:
    worst = float((got - truth).abs().max())
    return worst if worst != worst else max(error, worst)


def _parts(shape: CacheShape, blocks: int) -> tuple[tuple[int, ...], ...]:
    """The rows that a cache and a context hold: fewer where they are small."""
    parts: tuple[tuple[int, ...], ...] = _PARTS
    if shape.context_len < sum(parts[0]):
        parts = tuple((1, 0, 0, 1) for _ in parts)
    columns = -(-sum(parts[0]) // shape.block_size)
    return parts[: max(1, blocks // columns)]


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[Any]:
    """Windows and chunks of a few positions in the model's own code; yields what makes the same of
    the descriptions of its layers."""
    layers = layers_of(model)
    sizes = {size for layer in layers for size in (layer.window, layer.chunk) if size is not None}
    short = {size: _WINDOW + number for number, size in enumerate(sorted(sizes)) if size > _WINDOW}
    changed: list[tuple[Any, str, int]] = []
    configs = [getattr(module, "config", None) for module in model.modules()]
    holders: Sequence[Any] = list(
        {id(holder): holder for holder in (*configs, *model.modules())}.values()
    )
    for holder in holders if short else ():
        for name in ("sliding_window", "attention_chunk_size"):
            value = getattr(holder, name, None) if holder is not None else None
            if type(value) is int and value in short:
                changed.append((holder, name, value))
                setattr(holder, name, short[value])

    def shortened(needs: Sequence[LayerShape]) -> tuple[LayerShape, ...]:
        made = [
            replace(
                layer,
                window=short.get(layer.window or 0, layer.window),
                chunk=short.get(layer.chunk or 0, layer.chunk),
            )
            for layer in needs
        ]
        return tuple(made)

    try:
        if short and read_layers(model) != shortened(layers):
            raise PairRefused(
                f"{type(model).__name__} is not served: its windows cannot be tried out with a few"
                " tokens"
            )
        yield shortened
    finally:
        for holder, name, value in changed:
            setattr(holder, name, value)
