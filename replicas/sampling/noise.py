"""A counter-based generator of Gumbel noise: no state, any element on its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

# Golden-ratio and multiplier constants of splitmix64 (Steele et al., 2014) as signed int64, and
# beside each as it is published.
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
# Multipliers of murmur3's 32-bit finaliser, as signed int32.
_FMIX_1 = -0x7A143595  # 0x85EBCA6B
_FMIX_2 = -0x3D4D51CB  # 0xC2B2AE35


NOISE_MOST = 22.5
"""No noise is greater: that of the smallest number in 31 bits is 32 log 2."""


@dataclass(slots=True)
class Noise:
    """The noise of all tokens that may follow at some positions of each row."""

    keys: torch.Tensor  # [rows, width], int64
    scale: torch.Tensor  # [rows, 1, 1], float32: 1, or 0 for a row without noise

    def of(self, ids: torch.Tensor | int) -> torch.Tensor:  # [rows, width, n], float32
        """Of these ids, [n] or [rows, width, n]; or of so many, from 0 on. Read, never changed."""
        return gumbel_noise(self.keys, ids).mul_(self.scale)

    def take(self, rows: torch.Tensor, columns: torch.Tensor) -> Noise:
        """Of these positions, [n] each, int64: n rows of one position."""
        return Noise(self.keys[rows, columns][:, None], self.scale[rows])

    def columns(self, begin: int, end: int) -> Noise:
        """Of the positions [begin, end) of each row."""
        return Noise(self.keys[:, begin:end], self.scale)


def noise_keys(
    seed: torch.Tensor,  # [rows, 1], int64
    positions: torch.Tensor,  # [rows, width], int64
) -> torch.Tensor:  # [rows, width], int64
    """What the noise at a position follows from."""
    return _splitmix64(_splitmix64(seed) + positions * _GOLDEN)


def gumbel_noise(
    keys: torch.Tensor,  # [rows, width], int64
    ids: torch.Tensor | int,  # [n] or [rows, width, n], int64; or so many, from 0 on
) -> torch.Tensor:  # [rows, width, n], float32
    """Standard Gumbel noise of token ids: -log of an exponential.

    Counter-based in the sense of Salmon et al. (SC 2011): no state, any element on its own. Token
    ids are spread over 32 bits and mixed with the 64-bit key of seed and position.
    """
    key = keys[..., None]
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    bits = (_spread_below(ids, keys.device) if isinstance(ids, int) else _spread(ids)) ^ low
    _shift_xor_(bits, 16, 0xFFFF).mul_(_FMIX_1).add_(high)
    _shift_xor_(bits, 13, 0x7FFFF).mul_(_FMIX_2)
    _shift_xor_(bits, 16, 0xFFFF).bitwise_and_(0x7FFFFFFF)
    # 31 bits as a number in (0, 1), negated. Small ones keep their relative precision, and with
    # log1p so does the small exponential that wins the argmax; -1 itself is kept out.
    uniform = bits.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1.0)
    return uniform.log1p_().neg_().log_().neg_()


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function on int64; products wrap around."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _spread(ids: torch.Tensor) -> torch.Tensor:  # int32, of the same shape
    """Token ids under murmur3's 32-bit finaliser."""
    x = ids.to(torch.int32)
    _shift_xor_(x, 16, 0xFFFF).mul_(_FMIX_1)
    _shift_xor_(x, 13, 0x7FFFF).mul_(_FMIX_2)
    return _shift_xor_(x, 16, 0xFFFF)


@lru_cache(maxsize=8)
def _spread_below(count: int, device: torch.device) -> torch.Tensor:  # [count], int32
    return _spread(torch.arange(count, device=device))


def _shift_xor_(x: torch.Tensor, bits: int, mask: int) -> torch.Tensor:
    """x ^= x >> bits in place; the mask makes the shift a logical one."""
    return x.bitwise_xor_((x >> bits).bitwise_and_(mask))
