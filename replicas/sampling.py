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
from dataclasses import dataclass

import torch

from scheduler.messages import SamplingParams

# Golden-ratio and multiplier constants of splitmix64 (Steele et al., 2014), as signed int64.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
# Multipliers of murmur3's 32-bit finaliser, as signed int32.
_FMIX_1 = 0x85EBCA6B - (1 << 32)
_FMIX_2 = 0xC2B2AE35 - (1 << 32)


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of a group's rows as tensors, made once per order."""

    sampled: torch.Tensor  # [rows], bool: temperature > 0
    temperature: torch.Tensor  # [rows], float32; 1 for greedy rows
    top_k: torch.Tensor  # [rows], int64; 0 keeps all
    top_p: torch.Tensor  # [rows], float32
    min_p: torch.Tensor  # [rows], float32
    seed: torch.Tensor  # [rows], int64
    any_sampled: bool
    all_sampled: bool
    top_k_max: int
    any_top_p: bool
    any_min_p: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> SamplingBatch:
        """Stack the rows' parameters; top-k/top-p/min-p of greedy rows are ignored."""
        hot = [p for p in params if p.temperature > 0.0]
        return cls(
            sampled=torch.tensor([p.temperature > 0.0 for p in params], device=device),
            temperature=torch.tensor([_divisor(p) for p in params], device=device),
            top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
            seed=torch.tensor([p.seed for p in params], dtype=torch.int64, device=device),
            any_sampled=bool(hot),
            all_sampled=len(hot) == len(params),
            top_k_max=max((p.top_k for p in hot), default=0),
            any_top_p=any(p.top_p < 1.0 for p in hot),
            any_min_p=any(p.min_p > 0.0 for p in hot),
        )


def _divisor(params: SamplingParams) -> float:
    """The temperature as float32 can hold it; 1 for greedy rows."""
    return max(params.temperature, 1e-30) if params.temperature > 0.0 else 1.0


def choose(
    logits: torch.Tensor,  # [rows, width, vocab]
    sampling: SamplingBatch,
    positions: torch.Tensor,  # [rows, width], int64: the index each chosen token will have
) -> torch.Tensor:  # [rows, width], int64
    """The token that each of the logits stands for."""
    if not sampling.any_sampled:
        return logits.argmax(dim=-1)
    rows, width, vocab = logits.shape
    flat = logits.float().view(rows * width, vocab)
    spread = _per_position(sampling, width)
    scores = _filtered(flat, spread)
    scores = scores + gumbel_noise(spread.seed, positions.reshape(-1), vocab)
    sampled = scores.argmax(dim=-1).view(rows, width)
    if sampling.all_sampled:
        return sampled
    return torch.where(sampling.sampled[:, None], sampled, logits.argmax(dim=-1))


def _per_position(sampling: SamplingBatch, width: int) -> SamplingBatch:
    """Repeat each row's parameters for its `width` positions."""
    if width == 1:
        return sampling
    tensors = {
        name: getattr(sampling, name).repeat_interleave(width)
        for name in ("sampled", "temperature", "top_k", "top_p", "min_p", "seed")
    }
    return SamplingBatch(
        **tensors,
        any_sampled=sampling.any_sampled,
        all_sampled=sampling.all_sampled,
        top_k_max=sampling.top_k_max,
        any_top_p=sampling.any_top_p,
        any_min_p=sampling.any_min_p,
    )


def _filtered(
    logits: torch.Tensor,  # [n, vocab], float32
    sampling: SamplingBatch,  # of n rows
) -> torch.Tensor:  # [n, vocab], float32: scaled, -inf where a token is out
    """Temperature, then top-k, top-p and min-p, each on what the one before it kept."""
    # The best logit becomes 0 before the division, so that no temperature overflows it.
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature[:, None]
    if sampling.top_k_max > 0:
        scores = _keep_top_k(scores, sampling)
    if sampling.any_top_p:
        scores = _keep_top_p(scores, sampling.top_p)
    if sampling.any_min_p:
        # Ratio to the best token, whose score is 0: p_i / p_best = exp(score_i).
        scores = scores.masked_fill(scores.exp() < sampling.min_p[:, None], -torch.inf)
    return scores


def _keep_top_k(scores: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    vocab = scores.shape[-1]
    kept = min(sampling.top_k_max, vocab)
    best = scores.topk(kept, dim=-1).values  # [n, kept], falling
    nth = (sampling.top_k.clamp(1, kept) - 1)[:, None]
    threshold = best.gather(-1, nth)
    # Rows with top_k 0 keep everything; tokens that tie with the k-th stay.
    threshold = threshold.masked_fill((sampling.top_k == 0)[:, None], -torch.inf)
    return scores.masked_fill(scores < threshold, -torch.inf)


def _keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    # A token stays while the mass before it is below top_p: the best one always does.
    mass_before = probability.cumsum(dim=-1) - probability
    out = (mass_before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(out).scatter_(-1, index, out), -torch.inf)


def gumbel_noise(
    seed: torch.Tensor,  # [n], int64
    position: torch.Tensor,  # [n], int64
    vocab: int,
) -> torch.Tensor:  # [n, vocab], float32
    """Standard Gumbel noise of every token id at (seed, position): -log of an exponential.

    Counter-based in the sense of Salmon et al. (SC 2011): no state, any element on its own.
    """
    key = _splitmix64(_splitmix64(seed) + position * _GOLDEN)
    low = key.to(torch.int32)[:, None]
    high = (key >> 32).to(torch.int32)[:, None]
    token = torch.arange(vocab, dtype=torch.int32, device=seed.device)[None, :]
    bits = _fmix32(_fmix32(token + low) ^ high)
    # 31 bits as a number in (0, 1). Small numbers keep their relative precision, and with log1p so
    # does the small exponential that wins the argmax; 1.0 itself is kept out.
    uniform = ((bits & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    return -torch.log(-torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-24)))


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function on int64; products wrap around."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _fmix32(x: torch.Tensor) -> torch.Tensor:
    """murmur3's 32-bit finaliser on int32; shifts are made logical by a mask."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FMIX_1
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _FMIX_2
    return x ^ ((x >> 16) & 0xFFFF)
