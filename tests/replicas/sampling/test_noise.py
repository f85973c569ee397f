"""Proves that the noise is the one that its publications define, computed here on plain integers.

A seed's output must stay the same from release to release, so the noise may not drift.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from replicas.sampling import Noise
from replicas.sampling.noise import NOISE_MOST, gumbel_noise, noise_keys

_64, _32 = (1 << 64) - 1, (1 << 32) - 1
GOLDEN = 0x9E3779B97F4A7C15

seeds = st.integers(0, 2**63 - 1)
positions = st.integers(0, 2**31)
ids = st.integers(0, 2**20)


def splitmix64(state: int) -> int:
    """The next output of the generator in this state (Steele, Lea, Flood: OOPSLA 2014)."""
    z = (state + GOLDEN) & _64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64
    return z ^ (z >> 31)


def fmix32(h: int, add: int = 0) -> int:
    """murmur3's finaliser; `add` comes in after the first product."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B + add) & _32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _32
    return h ^ (h >> 16)


def by_definition(seed: int, position: int, token: int) -> float:
    key = splitmix64((splitmix64(seed) + position * GOLDEN) & _64)
    bits = fmix32(fmix32(token) ^ (key & _32), key >> 32) & 0x7FFFFFFF
    return -math.log(-math.log1p(-(bits + 0.5) / 2**31))


def test_the_hashes_here_are_the_published_ones() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(GOLDEN) == 0x6E789E6AA1B965F4
    assert fmix32(0) == 0
    assert fmix32(1) == 0x514E28B7


@given(seeds, positions, ids)
def test_the_noise_of_a_seed_a_position_and_a_token_is_that_of_the_definition(
    seed: int, position: int, token: int
) -> None:
    keys = noise_keys(torch.tensor([[seed]]), torch.tensor([[position]]))
    (found,) = gumbel_noise(keys, torch.tensor([token])).flatten().tolist()
    # float32 has 24 bits of the 31: small numbers keep them, and it is those that win.
    expected = by_definition(seed, position, token)
    assert math.isclose(found, expected, rel_tol=1e-4, abs_tol=1e-4) or found < -2.5
    assert found < NOISE_MOST


def test_the_greatest_noise_of_a_million_tokens_is_that_of_the_definition() -> None:
    """It comes of the smallest number, of which no bit may be lost."""
    for seed in range(3):
        keys = noise_keys(torch.tensor([[seed]]), torch.tensor([[7]]))
        found, token = gumbel_noise(keys, torch.arange(1 << 20)).flatten().max(0)
        assert math.isclose(found.item(), by_definition(seed, 7, int(token)), abs_tol=1e-5)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3), st.integers(1, 300))
def test_noise_taken_of_some_rows_and_columns_is_that_of_the_whole(
    rows: list[int], count: int
) -> None:
    keys = noise_keys(torch.tensor(rows)[:, None], torch.arange(5)[None])
    scale = torch.tensor([float(seed % 2) for seed in rows])[:, None, None]
    noise = Noise(keys, scale)
    whole = noise.of(count)
    for row, seed in enumerate(rows):
        assert bool(whole[row].any()) == bool(seed % 2), "a greedy row has none"
    assert torch.equal(noise.columns(1, 4).of(count), whole[:, 1:4])
    places = torch.tensor([len(rows) - 1, 0]), torch.tensor([4, 2])
    assert torch.equal(noise.take(*places).of(count), whole[places][:, None])


def key_of_bits(bits: int) -> torch.Tensor:  # [1, 1], int64
    """Under which token 0 has these bits: the high half of the key goes the mixing back."""
    bits ^= bits >> 16
    bits = bits * pow(0xC2B2AE35, -1, 1 << 32) & _32
    bits ^= bits >> 13 ^ bits >> 26
    return torch.tensor([[bits - (1 << 32 if bits >> 31 else 0)]]) << 32


def test_the_least_noise_is_finite_and_the_greatest_is_close_to_the_bound() -> None:
    least, greatest = (
        gumbel_noise(key_of_bits(bits), torch.tensor([0])).item() for bits in (0x7FFFFFFF, 0)
    )
    assert least == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)
    assert greatest == pytest.approx(32 * math.log(2), rel=1e-6)
    assert greatest < NOISE_MOST < greatest + 0.5
