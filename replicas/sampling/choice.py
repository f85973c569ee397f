"""The one rule for choosing a token, greedy or sampled, for the draft and for the target.

A choice is a deterministic function of (logits, sampling parameters, seed, position). Temperature
above 0 adds Gumbel noise and takes the argmax, which samples from the softmax exactly; the noise
comes from a counter-based generator keyed by (seed, position, token id), so it depends on no batch
mate, schedule or device state. Draft and target use the same noise: a draft token is right iff it
equals the target's choice (drafter-invariant coupling, arXiv 2408.07978).

Knows nothing of models, caches or rows that come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from replicas.cuda.transfers import upload
from replicas.sampling.noise import gumbel_noise
from scheduler.messages import SamplingParams

_MASS_ROUNDING = 1e-4
"""More than a sum of probabilities in float32 may be off by."""
_FAR_BELOW = 1e38
"""What is struck out is so far below the best: exp of it is 0, and no noise makes it the best."""

_PLAIN = SamplingParams(temperature=1.0)
"""Stands for a greedy row in a whole batch."""


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of a group's rows, made once per batch.

    Tensors hold the sampled rows only; greedy rows need none.
    """

    rows: torch.Tensor | None  # [sampled], int64: which rows are sampled; None: all of them
    greedy: torch.Tensor | None  # [rows, 1], bool: rows that only stand among them; None: none
    temperature: torch.Tensor  # [sampled, 1, 1], float32
    top_k: torch.Tensor  # [sampled, 1, 1], int64; 0 keeps all
    top_p: torch.Tensor  # [sampled, 1, 1], float32
    min_p: torch.Tensor  # [sampled, 1, 1], float32
    seed: torch.Tensor  # [sampled, 1], int64
    any_sampled: bool
    top_k_max: int
    any_top_p: bool
    any_min_p: bool

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        device: torch.device,
        whole: bool = False,
    ) -> SamplingBatch:
        """Stack the rows' parameters; top-k, top-p and min-p of greedy rows are ignored.

        If some row is sampled, a `whole` batch computes noise for greedy rows, too, and does not
        use it: its tensors then have all rows, whichever are sampled.
        """
        sampled = [i for i, p in enumerate(params) if p.temperature > 0.0]
        if params and not sampled:
            return _greedy_batch(device)
        greedy = None
        if whole and sampled and len(sampled) < len(params):
            greedy = upload([[p.temperature == 0.0] for p in params], torch.bool, device)
            params = [p if p.temperature > 0.0 else _PLAIN for p in params]
            sampled = list(range(len(params)))
        hot = [params[i] for i in sampled]

        def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return upload(values, dtype, device)[:, None, None]

        return cls(
            rows=None if len(hot) == len(params) else upload(sampled, torch.int64, device),
            greedy=greedy,
            # float32 holds no smaller temperature; dividing by 0 would choose nothing.
            temperature=column([max(p.temperature, 1e-30) for p in hot], torch.float32),
            top_k=column([p.top_k for p in hot], torch.int64),
            top_p=column([p.top_p for p in hot], torch.float32),
            min_p=column([p.min_p for p in hot], torch.float32),
            seed=column([p.seed for p in hot], torch.int64)[..., 0],
            any_sampled=bool(hot),
            top_k_max=max((p.top_k for p in hot), default=0),
            any_top_p=any(p.top_p < 1.0 for p in hot),
            any_min_p=any(p.min_p > 0.0 for p in hot),
        )

    @property
    def whole(self) -> bool:
        """Whether it has all rows, or none is sampled."""
        return self.rows is None or not self.any_sampled

    def take(self, rows: torch.Tensor) -> SamplingBatch:
        """A whole batch with these of its rows, [n], int64, each as often as it is named."""
        if not self.any_sampled:
            return self
        assert self.rows is None, "only a whole batch has all rows to take from"
        return replace(
            self,
            greedy=None if self.greedy is None else self.greedy[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
        )

    def unfiltered(self) -> SamplingBatch:
        """The same with all tokens kept: for a draft, which the target checks."""
        return replace(self, top_k_max=0, any_top_p=False, any_min_p=False)

    def noise(
        self,
        positions: torch.Tensor,  # [rows, width], int64: the index each chosen token will have
        vocab: int,
    ) -> torch.Tensor | None:  # [sampled, width, vocab], float32; None for a greedy group
        """The noise of the sampled rows: the same for draft and target, so computed once a step."""
        if not self.any_sampled:
            return None
        if self.rows is not None:
            positions = positions[self.rows]
        return gumbel_noise(self.seed, positions, vocab)


def sampling_batch(
    params: tuple[SamplingParams, ...], device: torch.device, whole: bool
) -> SamplingBatch:
    """`SamplingBatch.of`, but the same one as long as the same rows come again: batch after batch
    as a rule, and its tensors are on the device then."""
    if params and not any(one.temperature for one in params):
        return _greedy_batch(device)
    return _kept_batch(params, device, whole)


_kept_batch = lru_cache(maxsize=64)(SamplingBatch.of)


def first_best(
    scores: torch.Tensor,  # [rows, ..., vocab]
    out: torch.Tensor | None = None,  # [rows, ...], int64, contiguous
) -> torch.Tensor:  # [rows, ...], int64
    """argmax: the first of equals, or of those that are no number.

    On a CPU torch's own goes element by element where numpy's goes by vectors: a tenth of the time
    at 56 rows of 4,096.
    """
    if not scores.is_cpu:
        return scores.argmax(dim=-1) if out is None else torch.argmax(scores, -1, out=out)
    if out is not None:
        array_of(scores).argmax(axis=-1, out=out.numpy())
        return out
    best: torch.Tensor = torch.from_numpy(array_of(scores).argmax(axis=-1))
    return best


def array_of(scores: torch.Tensor) -> Any:
    """The scores of a CPU as numpy's array, which knows no bfloat16: float32 holds it exactly."""
    return (scores if scores.dtype is torch.float32 else scores.float()).numpy()


@cache
def _greedy_batch(device: torch.device) -> SamplingBatch:
    """Nothing is read of a batch without sampled rows, so one serves all."""
    none = torch.empty(0, device=device)
    return SamplingBatch(none.long(), None, none, none, none, none, none, False, 0, False, False)


def choose(
    logits: torch.Tensor,  # [rows, width, vocab]
    sampling: SamplingBatch,
    noise: torch.Tensor | None,  # [sampled, width, vocab or more], of the chosen positions
    out: torch.Tensor | None = None,  # [rows, width], int64, contiguous
) -> torch.Tensor:  # [rows, width], int64
    """The token that each of the logits stands for; with `out`, written there."""
    if noise is None:
        return first_best(logits, out)
    chosen = _choose_hot(logits, sampling, noise)
    return chosen if out is None else out.copy_(chosen)


def _choose_hot(
    logits: torch.Tensor, sampling: SamplingBatch, noise: torch.Tensor
) -> torch.Tensor:  # [rows, width], int64
    """`choose` where some rows are sampled."""
    sampled, _ = _sample(_hot(logits, sampling), sampling, noise[..., : logits.shape[-1]])
    if sampling.greedy is not None:
        return torch.where(sampling.greedy, first_best(logits), sampled)
    if sampling.rows is None:
        return sampled
    return first_best(logits).index_copy_(0, sampling.rows, sampled)


def choose_and_rate(
    logits: torch.Tensor,  # [rows, width, vocab]
    sampling: SamplingBatch,  # whole
    noise: torch.Tensor | None,  # [rows, width, vocab or more]
) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, width] each, int64 and float32
    """The same, and how sure another model's choice is to be the same: a log-probability.

    A greedy token is rated by its probability. A sampled one has been chosen by score *and* noise,
    and the other model adds the same noise, so what counts is how far it is ahead with the noise:
    the softmax of the noisy scores is the probability that it stays ahead when each score changes
    by a standard Gumbel variable. Both are the same rule, without and with noise.
    """
    if noise is None:
        return first_best(logits), _of_best(logits.float())
    assert sampling.rows is None, "only a whole batch is rated"
    sampled, noisy = _sample(_hot(logits, sampling), sampling, noise[..., : logits.shape[-1]])
    ahead = _of_best(noisy)
    if sampling.greedy is None:
        return sampled, ahead
    greedy, rated = sampling.greedy, _of_best(logits.float())
    return torch.where(greedy, first_best(logits), sampled), torch.where(greedy, rated, ahead)


def _of_best(scores: torch.Tensor) -> torch.Tensor:  # [...], float32
    """Log-probability of the best of these scores, [..., vocab], float32, under their softmax."""
    return scores.amax(dim=-1) - scores.logsumexp(dim=-1)


def _hot(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """Tempered scores of the sampled rows, [sampled, width, vocab], float32; the best is 0."""
    hot = logits if sampling.rows is None else logits[sampling.rows]
    # Differences in bfloat16 would change probabilities by some percent.
    hot = hot.float()
    # The best logit becomes 0 before the division, so that no temperature overflows it.
    return (hot - hot.amax(dim=-1, keepdim=True)).div_(sampling.temperature)


def _sample(
    scores: torch.Tensor,  # [sampled, width, vocab], float32, the best is 0
    sampling: SamplingBatch,
    noise: torch.Tensor,  # [sampled, width, vocab]
) -> tuple[torch.Tensor, torch.Tensor]:  # [sampled, width], int64; [sampled, width, vocab]
    """Argmax of scores and noise among the tokens that top-k, then top-p and min-p keep.

    Also the noisy scores, of which no struck-out token is the greatest.
    """
    if sampling.top_k_max > 0:
        scores = _keep_top_k(scores, sampling)
    noisy = scores + noise
    if sampling.any_min_p:
        # Ratio to the best token, whose score is 0: p_i / p_best = exp(score_i).
        noisy = noisy.masked_fill(scores.exp() < sampling.min_p, -torch.inf)
    if not sampling.any_top_p:
        return first_best(noisy), noisy
    return _sample_top_p(scores, sampling.top_p, noisy), noisy


def _keep_top_k(scores: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    if scores.is_cpu:
        threshold = _kth_best(scores.numpy(), sampling.top_k[:, 0, 0].tolist())
        # A few products by vectors: filling by a mask that is bool takes four times as long.
        struck = torch.ge(scores, threshold, out=torch.empty_like(scores)).sub_(1.0)
        return struck.mul_(_FAR_BELOW).add_(scores)
    kept = min(sampling.top_k_max, scores.shape[-1])
    best = scores.topk(kept, dim=-1).values  # [sampled, width, kept], falling
    nth = (sampling.top_k.clamp(1, kept) - 1).expand(-1, scores.shape[1], 1)
    # Rows with top_k 0 keep everything; tokens that tie with the k-th stay.
    threshold = best.gather(-1, nth).masked_fill(sampling.top_k == 0, -torch.inf)
    return scores.masked_fill(scores < threshold, -torch.inf)


def _kth_best(scores: Any, top_k: Sequence[int]) -> torch.Tensor:  # [sampled, width, 1]
    """Of each row its own k-th best, -inf where that is 0; of an array [sampled, width, vocab].

    numpy parts the better from the others by vectors, where torch's top-k sorts by elements.
    """
    vocab = scores.shape[-1]
    at = [vocab - min(k, vocab) for k in top_k]
    parted = np.partition(scores, sorted({one for one, k in zip(at, top_k, strict=True) if k}))
    found = np.full((*scores.shape[:-1], 1), -np.inf, dtype=np.float32)
    for row, k in enumerate(top_k):
        if k:
            found[row, :, 0] = parted[row, :, at[row]]
    return torch.from_numpy(found)


def _sample_top_p(
    scores: torch.Tensor,  # [sampled, width, vocab]
    top_p: torch.Tensor,  # [sampled, 1, 1]
    noisy: torch.Tensor,  # [sampled, width, vocab], contiguous; what is struck out is -inf then
) -> torch.Tensor:  # [sampled, width], int64
    """The best noisy token of the nucleus: those with less than top_p of mass on likelier ones.

    Spares the sort: take the best noisy token, and if it lies outside the nucleus so does all that
    is no likelier; strike that out and take the next. The likeliest token is always inside, and
    each round strikes out at least one, so the loop ends, after two or three rounds as a rule.
    Of nearly all tokens a sum in float32 says as surely where they lie; only of the others is the
    mass added up exactly, and only rows whose token was struck out take part in the next round.
    """
    probability = scores.softmax(dim=-1)
    token = first_best(noisy)
    best = probability.gather(-1, token[..., None])
    mass_before = _likelier(probability, best).sum(dim=-1).tolist()
    limits = top_p[:, 0, 0].tolist()
    # A few numbers, one by one: less code to fetch than for any operation on all.
    doubtful = {
        row * scores.shape[1] + column: limit
        for row, (masses, limit) in enumerate(zip(mass_before, limits, strict=True))
        for column, mass in enumerate(masses)
        if limit < 1.0 and mass > 0.0 and mass >= limit - _MASS_ROUNDING
    }
    if doubtful:
        _strike(probability.flatten(0, 1), noisy.flatten(0, 1), token.view(-1), doubtful)
    return token


def _strike(
    probability: torch.Tensor,  # [tokens, vocab]
    noisy: torch.Tensor,  # [tokens, vocab], changed
    token: torch.Tensor,  # [tokens], int64, changed
    doubtful: dict[int, float],
) -> None:
    """The rounds of `_sample_top_p` for a few of the tokens, by number with their top_p: on the
    host, where so little takes less time than its calls on a device would."""
    rows = list(doubtful)
    chosen = token[rows].tolist()
    every, left = array_of(_in_multiples(probability[rows]).cpu()), noisy[rows].cpu()
    for row, limit in enumerate(doubtful.values()):
        likely, scores = every[row], left[row].numpy()
        while True:
            best = likely[chosen[row]]
            # A float64 holds every partial sum exactly, so that their order decides nothing.
            mass_before = likely[likely > best].sum(dtype=np.float64)
            # The likeliest has no mass before it: inside, even where float32 holds a top_p of 0.
            if mass_before == 0.0 or not mass_before >= limit:
                break
            scores[likely <= best] = -np.inf
            chosen[row] = int(scores.argmax())
    token[rows] = torch.tensor(chosen, device=token.device)
    noisy[rows] = left.to(noisy.device)


def _in_multiples(probability: torch.Tensor) -> torch.Tensor:
    """In place: of 2^-40, whole ones, so that sums of them are exact."""
    # Of what is not negative floor is trunc, and on a CPU 25 times as fast.
    return probability.mul_(2.0**40).floor_().mul_(2.0**-40)


def _likelier(probability: torch.Tensor, beyond: torch.Tensor) -> torch.Tensor:
    """The probabilities that are greater, and 0 in place of the others."""
    # Where, of a mask that is bool, takes four times as long on a CPU.
    return torch.gt(probability, beyond, out=torch.empty_like(probability)).mul_(probability)
