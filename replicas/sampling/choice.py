"""The one rule for choosing a token, greedy or sampled, for the draft and for the target.

A choice is a deterministic function of (logits, sampling parameters, seed, position). Temperature
above 0 adds Gumbel noise and takes the argmax, which samples from the softmax exactly; the noise
comes from a counter-based generator keyed by (seed, position, token id), so it depends on no batch
mate, schedule or device state. Draft and target use the same noise: a draft token is right iff it
equals the target's choice (drafter-invariant coupling, arXiv 2408.07978).

The rule: top-k keeps the k best scores and their equals; of the softmax of these, top-p keeps the
tokens with less than top_p of mass on greater scores, and the best ones; min-p keeps scores of at
least log(min_p) below the best. Of the tokens kept the best noisy score wins, of equals the first.

Most choices need a few candidates and their noise alone: a filter strikes out all other tokens, or
no noise is large enough to lift one of them to the top. Where neither holds, all tokens are looked
at by the same rule.

Knows nothing of models, caches or rows that come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from replicas.cuda.transfers import upload
from replicas.sampling.noise import NOISE_MOST, gumbel_noise
from scheduler.messages import SamplingParams

_CANDIDATES = (64, 256)
"""Likeliest tokens that are looked at first: a part of the vocabulary, within these bounds."""

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

    def take(self, rows: torch.Tensor) -> SamplingBatch:
        """A batch of these of its sampled rows, [n], int64, each as often as it is named."""
        if not self.any_sampled:
            return self
        return replace(
            self,
            rows=None,
            greedy=None if self.greedy is None else self.greedy[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
        )


def sampling_batch(
    params: tuple[SamplingParams, ...], device: torch.device, whole: bool
) -> SamplingBatch:
    """`SamplingBatch.of`, but the same one as long as the same rows come again: batch after batch
    as a rule, and its tensors are on the device then."""
    if params and not any(one.temperature for one in params):
        return _greedy_batch(device)
    return _kept_batch(params, device, whole)


_kept_batch = lru_cache(maxsize=64)(SamplingBatch.of)


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


@cache
def _greedy_batch(device: torch.device) -> SamplingBatch:
    """Nothing is read of a batch without sampled rows, so one serves all."""
    none = torch.empty(0, device=device)
    return SamplingBatch(none.long(), None, none, none, none, none, none, False, 0, False, False)


def choose(
    logits: torch.Tensor,  # [rows, width, vocab]
    sampling: SamplingBatch,
    positions: torch.Tensor,  # [rows, width], int64: the index that each chosen token will have
) -> torch.Tensor:  # [rows, width], int64
    """The token that each of the logits stands for."""
    if not sampling.any_sampled:
        return first_best(logits)
    hot, positions = _hot(logits, positions, sampling)
    sampled = _sampled(hot, sampling, positions)
    if sampling.greedy is not None:
        return torch.where(sampling.greedy, first_best(logits), sampled)
    if sampling.rows is None:
        return sampled
    return first_best(logits).index_copy_(0, sampling.rows, sampled)


def choose_and_rate(
    logits: torch.Tensor,  # [rows, width, vocab]
    sampling: SamplingBatch,  # whole
    positions: torch.Tensor,  # [rows, width], int64
) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, width] each, int64 and float32
    """The same, and how sure another model's choice is to be the same: a log-probability.

    A greedy token is rated by its probability. A sampled one has been chosen by score *and* noise,
    and the other model adds the same noise, so what counts is how far it is ahead with the noise:
    the softmax of the noisy scores is the probability that it stays ahead when each score changes
    by a standard Gumbel variable. Both are the same rule, without and with noise.
    """
    token, scores = choose(logits, sampling, positions), logits.float()
    if sampling.any_sampled:
        assert sampling.rows is None, "only a whole batch is rated"
        hot, positions = _hot(logits, positions, sampling)
        noisy = hot + gumbel_noise(sampling.seed, positions, every_id(hot))
        greedy = sampling.greedy
        scores = noisy if greedy is None else torch.where(greedy[..., None], scores, noisy)
    return token, scores.gather(-1, token[..., None])[..., 0] - scores.logsumexp(dim=-1)


def _hot(
    logits: torch.Tensor, positions: torch.Tensor, sampling: SamplingBatch
) -> tuple[torch.Tensor, torch.Tensor]:  # [sampled, width, vocab], float32; [sampled, width]
    """Tempered scores of the sampled rows, of which the best is 0, and their positions."""
    if sampling.rows is not None:
        logits, positions = logits[sampling.rows], positions[sampling.rows]
    # Differences in bfloat16 would change probabilities by some percent.
    hot = logits.float()
    # The best logit becomes 0 before the division, so that no temperature overflows it.
    return (hot - hot.amax(dim=-1, keepdim=True)).div_(sampling.temperature), positions


def _sampled(
    scores: torch.Tensor,  # [sampled, width, vocab], float32, the best is 0
    sampling: SamplingBatch,
    positions: torch.Tensor,  # [sampled, width], int64
) -> torch.Tensor:  # [sampled, width], int64
    if sampling.top_k_max > 0:
        scores = _keep_top_k(scores, sampling)
    vocab = scores.shape[-1]
    probability = scores.softmax(dim=-1) if sampling.any_top_p else scores
    most = min(max(vocab // 64, _CANDIDATES[0]), _CANDIDATES[1], vocab)
    best, ids = scores.topk(most, dim=-1)
    noise = gumbel_noise(sampling.seed, positions, ids)
    token, sure = _best_of(best, ids, probability.gather(-1, ids), noise, sampling)
    if most < vocab and not sure.all():
        row, column = sure.logical_not().nonzero(as_tuple=True)
        some = sampling.take(row)
        at = positions[row, column][:, None]
        token[row, column] = _of_all(
            scores[row, column][:, None], probability[row, column][:, None], some, at
        )[:, 0]
    return token


def _best_of(
    scores: torch.Tensor,  # [sampled, width, n], falling
    ids: torch.Tensor,  # [sampled, width, n], int64
    probability: torch.Tensor,  # [sampled, width, n], float32; read where top-p filters
    noise: torch.Tensor,  # [sampled, width, n], float32
    sampling: SamplingBatch,
) -> tuple[torch.Tensor, torch.Tensor]:  # [sampled, width] each, int64 and bool
    """The choice among the best n scores, and whether no other token could be chosen."""
    last = scores[..., -1:]
    noisy = scores + noise
    beyond = last == -torch.inf
    if sampling.any_min_p:
        least = sampling.min_p.log()
        noisy = noisy.masked_fill(scores < least, -torch.inf)
        beyond = beyond | (last < least)
    if sampling.any_top_p:
        mass = _mass_before(scores, probability)
        struck = (mass >= sampling.top_p) & (mass > 0) & (sampling.top_p < 1)
        noisy = noisy.masked_fill(struck, -torch.inf)
        beyond = beyond | struck[..., -1:]
    winner = noisy.amax(dim=-1, keepdim=True)
    beyond = beyond | (last + NOISE_MOST < winner)
    # Of equals the first id.
    token = ids.masked_fill(noisy != winner, torch.iinfo(ids.dtype).max).amin(dim=-1)
    # No token wins among those that are no number.
    return torch.where(token == torch.iinfo(ids.dtype).max, ids[..., 0], token), beyond[..., 0]


def _mass_before(scores: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
    """Probability on greater scores, [.., n], float64, of scores that fall."""
    multiples = _in_multiples(probability)
    before = multiples.cumsum(-1) - multiples
    # Equal scores have the mass before the first of them.
    first = torch.searchsorted(-scores.contiguous(), -scores.contiguous())
    return before.gather(-1, first.clamp_(max=scores.shape[-1] - 1))


def _of_all(
    scores: torch.Tensor,  # [sampled, width, vocab]
    probability: torch.Tensor,  # [sampled, width, vocab]
    sampling: SamplingBatch,
    positions: torch.Tensor,  # [sampled, width], int64
) -> torch.Tensor:  # [sampled, width], int64
    """The choice among all tokens."""
    noisy = scores + gumbel_noise(sampling.seed, positions, every_id(scores))
    if sampling.any_min_p:
        noisy.masked_fill_(scores < sampling.min_p.log(), -torch.inf)
    token = first_best(noisy)
    if not sampling.any_top_p:
        return token
    multiples = _in_multiples(probability)
    while True:
        # If the best lies outside the nucleus, so does all that scores no more. The greatest score
        # lies inside, so this ends; after two or three rounds as a rule.
        level = scores.gather(-1, token[..., None])
        mass = multiples.masked_fill(scores <= level, 0.0).sum(-1, keepdim=True)
        struck = (mass >= sampling.top_p) & (mass > 0) & (sampling.top_p < 1)
        if not struck.any():
            return token
        noisy.masked_fill_(struck & (scores <= level), -torch.inf)
        token = first_best(noisy)


def _in_multiples(probability: torch.Tensor) -> torch.Tensor:  # float64
    """In whole multiples of 2^-40: a float64 holds all sums of them exactly, in any order."""
    return (probability.double() * 2.0**40).floor_().mul_(2.0**-40)


def every_id(scores: torch.Tensor) -> torch.Tensor:  # [vocab], int64
    return torch.arange(scores.shape[-1], device=scores.device)


def _keep_top_k(scores: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    kept = min(sampling.top_k_max, scores.shape[-1])
    best = scores.topk(kept, dim=-1).values  # [sampled, width, kept], falling
    nth = (sampling.top_k.clamp(1, kept) - 1).expand(-1, scores.shape[1], 1)
    # Rows with top_k 0 keep everything; tokens that tie with the k-th stay.
    threshold = best.gather(-1, nth).masked_fill(sampling.top_k == 0, -torch.inf)
    return scores.masked_fill(scores < threshold, -torch.inf)
