"""The one rule for choosing a token, greedy or sampled, for the draft and for the target.

A choice is a deterministic function of (logits, sampling parameters, seed, position). Temperature
above 0 adds Gumbel noise and takes the argmax, which samples from the softmax exactly; the noise
comes from a counter-based generator keyed by (seed, position, token id), so it depends on no batch
mate, schedule or device state. Draft and target use the same noise: a draft token is right iff it
equals the target's choice (drafter-invariant coupling, arXiv 2408.07978).

The rule: top-k keeps the k best scores and their equals; of the softmax of these, top-p keeps the
tokens with less than top_p of mass on greater scores; min-p keeps scores of at least log(min_p)
below the best. Of the tokens kept the best noisy score wins, of equals the first.

The rule looks at the likeliest tokens only, where it is certain that no other token can win: the
filters strike out all others, or no noise is large enough to lift one to the top. A draft needs no
such certainty, and no filters.

Knows nothing of models, caches or rows that come and go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from replicas.sampling.columns import likeliest
from replicas.sampling.noise import NOISE_MOST, Noise, noise_keys
from replicas.transfers import upload
from scheduler.messages import Sampling

_LIKELIEST = 256
_LIKELIEST_OF_DRAFT = 64
_UNITS = 2.0**34
"""Of weight per likeliest token: in whole units a float64 holds every sum of weights exactly."""

_GREEDY = Sampling()


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of a batch's rows. Greedy rows have no noise and no filters."""

    temperature: torch.Tensor  # [rows, 1, 1], float32
    noisy: torch.Tensor  # [rows, 1, 1], float32: 1, or 0 for a greedy row
    top_k: torch.Tensor  # [rows, 1, 1], int64; 0 keeps all
    top_p: torch.Tensor  # [rows, 1, 1], float64; infinite where it keeps all
    min_p: torch.Tensor  # [rows, 1, 1], float32
    seed: torch.Tensor  # [rows, 1], int64
    any_sampled: bool
    top_k_max: int
    any_top_p: bool
    any_min_p: bool

    @classmethod
    def of(cls, params: Sequence[Sampling], device: torch.device) -> SamplingBatch:
        """Stack the rows' parameters; the last batches' are kept, for rows stay together."""
        return _stacked(tuple(p if p.temperature else _GREEDY for p in params), device)

    def noise_after(self, positions: torch.Tensor) -> Noise | None:
        """The noise of the tokens that follow these positions, [rows, width], int64; None for a
        greedy batch."""
        if not self.any_sampled:
            return None
        return Noise(noise_keys(self.seed, positions + 1), self.noisy)

    def take(self, rows: torch.Tensor) -> SamplingBatch:
        """The batch of these of its rows, [n], int64, each as often as it is named."""
        if not self.any_sampled:
            return self
        return replace(
            self,
            temperature=self.temperature[rows],
            noisy=self.noisy[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
        )


@lru_cache(maxsize=64)
def _stacked(params: tuple[Sampling, ...], device: torch.device) -> SamplingBatch:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return upload(values, dtype, device)[:, None, None]

    least = torch.finfo(torch.float32).tiny
    # Dividing by 0 would choose nothing.
    temperatures = [max(p.temperature, least) for p in params]
    # The likeliest token has no mass before it and stays, however small top_p is.
    top_p = [max(p.top_p, least) if p.top_p < 1.0 else math.inf for p in params]
    return SamplingBatch(
        temperature=column(temperatures, torch.float32),
        noisy=column([float(p.temperature > 0.0) for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int64),
        top_p=column(top_p, torch.float64),
        min_p=column([p.min_p for p in params], torch.float32),
        seed=upload([p.seed for p in params], torch.int64, device)[:, None],
        any_sampled=any(p.temperature > 0.0 for p in params),
        top_k_max=max(p.top_k for p in params),
        any_top_p=any(p.top_p < 1.0 for p in params),
        any_min_p=any(p.min_p > 0.0 for p in params),
    )


def choose(
    logits: torch.Tensor,  # [rows, width, vocab]
    sampling: SamplingBatch,
    noise: Noise | None,  # of their positions; None: of a greedy batch
) -> torch.Tensor:  # [rows, width], int64
    """The token that each of the logits stands for."""
    if noise is None:
        return first_best(logits)
    scores = _keep_top_k(_scores(logits, sampling), sampling)
    every = scores.shape[-1]
    total = _sum(_weights(scores)) if sampling.any_top_p else None
    some, ids = _likeliest(scores, min(_LIKELIEST, every))
    place, noisy = _best(some, ids, sampling, noise, total)
    place = place[..., None]
    token = ids.gather(dim=-1, index=place).squeeze(dim=-1)
    # All other tokens score at most as much as the last of these.
    last = some.amin(dim=-1, keepdim=True)
    sure = last + NOISE_MOST * sampling.noisy < noisy.gather(dim=-1, index=place)
    sure |= last < sampling.min_p.log()
    if total is not None:
        sure |= _above(last, some, _weights(some)) >= sampling.top_p * total
    if not sure.all():
        row, column = sure.squeeze(dim=-1).logical_not().nonzero(as_tuple=True)
        some, noise = scores[row, column][:, None], noise.take(row, column)
        best, _ = _best(some, every, sampling.take(row), noise)
        token[row, column] = best.squeeze(dim=-1)
    return token


def guess(
    logits: torch.Tensor,  # [rows, vocab]
    sampling: SamplingBatch,
    noise: Noise | None,  # of the step
    column: int,
    ids: torch.Tensor | None = None,  # [vocab], int64: the target's ids, where they are others
) -> torch.Tensor:  # [rows], int64: places in the vocabulary
    """A draft's guess at the target's choice: the best noisy score among the likeliest tokens.
    Filters would strike out by the draft's law what the target's keeps."""
    if noise is None:
        return first_best(logits)
    scores = _scores(logits[:, None], sampling)
    scores, places = _likeliest(scores, min(_LIKELIEST_OF_DRAFT, scores.shape[-1]))
    noisy = scores + noise.columns(column, column + 1).of(places if ids is None else ids[places])
    return places.gather(-1, first_best(noisy)[..., None])[:, 0, 0]


def first_best(scores: torch.Tensor) -> torch.Tensor:  # [rows, ..., vocab] -> [rows, ...], int64
    """argmax: the first of equals, or of those that are no number.

    On a CPU torch's own goes element by element where numpy's goes by vectors: a tenth of the time
    at 56 rows of 4,096.
    """
    if not scores.is_cpu:
        return scores.argmax(dim=-1)
    # numpy knows no bfloat16; float32 holds it exactly.
    best: torch.Tensor = torch.from_numpy(scores.float().numpy().argmax(axis=-1))
    return best


def _scores(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """Tempered logits in float32, of which the best is 0."""
    # Differences in bfloat16 would change probabilities by some percent.
    scores = logits.float()
    # The best logit becomes 0 before the division, so that no temperature overflows it.
    return (scores - scores.amax(dim=-1, keepdim=True)).div_(sampling.temperature)


def _keep_top_k(scores: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """The scores, -inf for what top-k strikes out."""
    if sampling.top_k_max == 0:
        return scores
    kept = min(sampling.top_k_max, scores.shape[-1])
    best = scores.topk(kept, dim=-1).values  # [rows, width, kept], falling
    kth = (sampling.top_k.clamp(1, kept) - 1).expand(-1, scores.shape[1], 1)
    least = best.gather(-1, kth).masked_fill(sampling.top_k == 0, -torch.inf)
    return scores.masked_fill(scores < least, -torch.inf)


def _likeliest(
    scores: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, width, n] each, float32 and int64
    """The best scores and their places, which rise."""
    if not scores.is_cpu:
        places = scores.topk(n, dim=-1, sorted=False).indices
    else:
        places = likeliest(scores.flatten(0, 1), n).view(*scores.shape[:2], n)
    places = places.sort(dim=-1).values
    return scores.gather(-1, places), places


def _best(
    scores: torch.Tensor,  # [rows, width, n], float32: after top-k
    ids: torch.Tensor | int,  # [rows, width, n], int64; or n: the first
    sampling: SamplingBatch,
    noise: Noise,
    total: torch.Tensor | None = None,  # [rows, width, 1], float64: weight; None: of these scores
) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, width], int64, and [rows, width, n], float32
    """The place of the best noisy score that the filters keep, and the noisy scores of all."""
    noisy = scores + noise.of(ids)
    if sampling.any_min_p:
        noisy.masked_fill_(scores < sampling.min_p.log(), -torch.inf)
    place = first_best(noisy)
    if sampling.any_top_p:
        weights = _weights(scores)
        most = sampling.top_p * (_sum(weights) if total is None else total)
        parts = (tensor.flatten(0, 1) for tensor in (scores, noisy, weights, most))
        _enter_nucleus(place.view(-1), *parts)
    return place, noisy


def _enter_nucleus(
    place: torch.Tensor,  # [tokens], int64, changed
    scores: torch.Tensor,  # [tokens, n]
    noisy: torch.Tensor,  # [tokens, n]
    weights: torch.Tensor,  # [tokens, n]
    most: torch.Tensor,  # [tokens, 1], float64
) -> None:
    """Replace each best place that has so much weight on greater scores by the best that has not.

    If a token lies outside the nucleus, so does all that scores no more. The greatest score lies
    inside, so this ends; after two or three rounds as a rule, each of those that were outside.
    """
    left = torch.arange(len(place), device=place.device)
    while True:
        level = scores.gather(-1, place[left][:, None])
        (outside,) = (_above(level, scores, weights) >= most).squeeze(dim=-1).nonzero(as_tuple=True)
        if not len(outside):
            return
        left, most, level = left[outside], most[outside], level[outside]
        scores, weights = scores[outside], weights[outside]
        noisy = noisy[outside].masked_fill_(scores <= level, -torch.inf)
        place[left] = first_best(noisy)


def _weights(scores: torch.Tensor) -> torch.Tensor:
    """Probabilities but for a factor, in whole units."""
    return scores.exp().mul_(_UNITS).floor_()


def _sum(weights: torch.Tensor) -> torch.Tensor:  # [rows, width, 1], float64
    if not weights.is_cpu:
        return weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    # torch would make a copy in float64.
    sums: torch.Tensor = torch.from_numpy(
        weights.numpy().sum(axis=-1, keepdims=True, dtype=np.float64)
    )
    return sums


def _above(level: torch.Tensor, scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weight of the scores greater than the level, [rows, width, 1], float64."""
    # Where, of a mask that is bool, takes four times as long on a CPU.
    return _sum(torch.gt(scores, level, out=torch.empty_like(scores)).mul_(weights))
