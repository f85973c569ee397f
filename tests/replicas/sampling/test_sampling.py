"""Proves that `choose` is one deterministic rule per row, and that it samples the target's law.

The law is compared with transformers' own logits processors, which define what users expect of
temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from replicas.sampling.choice import SamplingBatch, choose, first_best, guess
from replicas.sampling.noise import NOISE_MOST, Noise, gumbel_noise, noise_keys
from scheduler.messages import Sampling

CPU = torch.device("cpu")
take = Noise.take
DRAWS = 200_000
PARAMS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.5, seed=2),
    Sampling(temperature=1.7, top_k=5, seed=3),
    Sampling(temperature=1.0, top_p=0.7, seed=4),
    Sampling(temperature=1.3, min_p=0.1, seed=5),
    Sampling(temperature=0.9, top_k=12, top_p=0.9, min_p=0.02, seed=6),
]


def some_logits(vocab: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 1.5


def chosen(
    logits: torch.Tensor,  # [rows, width, vocab]
    params: list[Sampling],
    positions: torch.Tensor,  # [rows, width]
) -> torch.Tensor:
    sampling = SamplingBatch.of(params, CPU)
    return choose(logits, sampling, sampling.noise_after(positions - 1))


def law(logits: torch.Tensor, params: Sampling) -> torch.Tensor:
    """What transformers would sample from, [vocab]."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())
    return scores.softmax(-1)[0]


def draws(logits: torch.Tensor, params: Sampling, n: int = DRAWS) -> torch.Tensor:
    """Tokens chosen at n positions from the same logits, [n]."""
    positions = torch.arange(n)[None]
    return chosen(logits.expand(1, n, -1), [params], positions)[0]


def chi_square(counts: torch.Tensor, probability: torch.Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom, over the tokens that may occur."""
    expected = probability * counts.sum()
    live = expected > 0
    statistic = ((counts - expected)[live] ** 2 / expected[live]).sum().item()
    return statistic, int(live.sum()) - 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_draws_follow_the_law_of_the_target(params: Sampling, dtype: torch.dtype) -> None:
    """That of the logits as they are: differences are taken in float32, whatever the dtype."""
    logits = some_logits().add_(9.0).to(dtype)
    probability = law(logits.float(), params)
    counts = torch.bincount(draws(logits, params), minlength=len(logits)).float()
    assert counts[probability == 0].sum() == 0, "a filtered token was chosen"
    statistic, freedom = chi_square(counts, probability)
    # Far beyond the 99.99th percentile of chi-square for these degrees of freedom (< 24).
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_noise_is_standard_gumbel_and_uncorrelated() -> None:
    n = 20_000
    positions = torch.arange(n)[None]
    noise = gumbel_noise(noise_keys(torch.tensor([[3]]), positions), 8)[0]
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.05)
    other_seed = gumbel_noise(noise_keys(torch.tensor([[4]]), positions), 1)[0]
    columns = torch.cat((noise[:-1], noise[1:, :1], other_seed[:-1]), dim=1)
    correlation = torch.corrcoef(columns.T) - torch.eye(columns.shape[1])
    assert correlation.abs().max().item() < 0.04


GREEDY = (
    *({"seed": seed} for seed in range(3)),
    *({"temperature": temperature} for temperature in (1e-6, 1e-30, 5e-324)),
    *({"temperature": 2.0, "top_p": top_p} for top_p in (5e-324, 1e-46, 1e-9)),
    {"temperature": 5.0, "top_k": 1},
)


@pytest.mark.parametrize("params", GREEDY, ids=str)
def test_what_leaves_one_token_is_greedy(params: dict[str, float]) -> None:
    logits = torch.randn(1, 400, 50)
    every = [Sampling(**{"seed": 1, **params})]
    assert torch.equal(chosen(logits, every, torch.arange(400)[None]), logits.argmax(-1))


def test_equal_logits_end_the_search_for_the_nucleus() -> None:
    logits = torch.zeros(1, 50, 8)
    params = [Sampling(temperature=1.0, top_p=1e-46, seed=1)]
    assert chosen(logits, params, torch.arange(50)[None]).shape == (1, 50)


def test_a_greedy_batch_has_no_noise_and_one_sampled_row_brings_it() -> None:
    positions = torch.zeros((2, 1), dtype=torch.int64)
    greedy, sampled = Sampling(), Sampling(temperature=0.5, seed=1)
    assert SamplingBatch.of([greedy, greedy], CPU).noise_after(positions) is None
    assert SamplingBatch.of([greedy, sampled], CPU).noise_after(positions) is not None


@pytest.mark.parametrize("filters", [{"min_p": 0.5}, {"top_p": 0.5}, {}])
def test_noise_of_the_whole_vocabulary_is_made_only_where_a_choice_may_hang_on_it(
    filters: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = []
    monkeypatch.setattr(Noise, "take", lambda self, *at: whole.append(at) or take(self, *at))
    logits = torch.full((1, 1, 4096), -NOISE_MOST / 2)
    logits[..., 7] = 0.0
    params = [Sampling(temperature=1.0, seed=3, **filters)]
    assert 0 <= chosen(logits, params, torch.zeros((1, 1), dtype=torch.int64)) < 4096
    assert bool(whole) == (not filters), "another token may still win by its noise"


def test_rows_taken_from_a_batch_choose_as_in_it() -> None:
    """Greedy ones among them."""
    params = [Sampling(), *PARAMS, Sampling(seed=3)]
    logits = torch.randn(8, 3, 50, generator=torch.Generator().manual_seed(9)) * 2
    positions, rows = torch.arange(24).view(8, 3), torch.tensor([7, 0, 3, 3, 1])
    batch = SamplingBatch.of(params, CPU)
    noise = batch.noise_after(positions)
    some = batch.take(rows).noise_after(positions[rows])
    got = choose(logits[rows], batch.take(rows), some)
    assert torch.equal(got, choose(logits, batch, noise)[rows])


@pytest.mark.parametrize("vocab", [30, 500, 16_500])
def test_a_guess_from_the_targets_own_logits_is_its_choice(vocab: int) -> None:
    """But for filters; also where the draft's vocabulary is the target's in another order."""
    params = [Sampling(), *PARAMS[:2], Sampling(seed=3)] * 20
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(2)) * 5
    batch = SamplingBatch.of(params, CPU)
    noise = batch.noise_after(torch.arange(len(params))[:, None])
    right = choose(logits[:, None], batch, noise)[:, 0]
    found = guess(logits, batch, noise, 0)
    assert (found == right).float().mean() > 0.97
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ids[guess(logits[:, ids], batch, noise, 0, ids)], found)


def by_definition(
    logits: torch.Tensor,  # [vocab]
    params: Sampling,
    position: int,
) -> int:
    """The rule as `choice` states it, token by token over the whole vocabulary."""
    scores = (logits.float() - logits.float().max()) / torch.tensor(params.temperature)
    if params.top_k:
        least = scores.sort(descending=True).values[min(params.top_k, len(scores)) - 1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    probability = scores.double().softmax(-1)
    keys = noise_keys(torch.tensor([[params.seed]]), torch.tensor([[position]]))
    noise = gumbel_noise(keys, len(scores))
    noisy = scores + noise[0, 0]
    noisy[scores < torch.tensor(params.min_p).log()] = -torch.inf
    falling, order = scores.sort(descending=True)
    before = probability[order].cumsum(-1) - probability[order]
    first = torch.searchsorted(-falling, -falling)  # of equals
    mass = before[first].clamp(min=0.0)
    struck = (mass >= params.top_p) & (first > 0)
    if params.top_p < 1:
        noisy[order[struck]] = -torch.inf
    return int(noisy.argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("deviation", [0.3, 3.0, 9.0])
@pytest.mark.parametrize("vocab", [701, 16_500])
def test_a_choice_is_that_of_the_rule_over_the_whole_vocabulary(
    dtype: torch.dtype, params: Sampling, deviation: float, vocab: int
) -> None:
    """Flat logits, where the likeliest tokens do not suffice, and steep ones; with many equals."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn((1, 12, vocab), generator=generator).mul_(deviation)
    logits[:, ::3] = logits[:, ::3].round()
    logits = logits.to(dtype)
    got = chosen(logits, [params], torch.arange(12)[None])[0].tolist()
    assert got == [by_definition(logits[0, i], params, i) for i in range(12)]


def test_the_noise_of_chosen_ids_has_the_bits_of_all() -> None:
    keys = noise_keys(torch.tensor([[1], [2], [3]]), torch.arange(15).view(3, 5))
    every = gumbel_noise(keys, 4099)
    for n in (1, 7, 64, 253):
        ids = torch.randint(4099, (3, 5, n), generator=torch.Generator().manual_seed(n))
        assert torch.equal(gumbel_noise(keys, ids), every.gather(-1, ids))
        # A draft with a smaller (unpadded) vocabulary must meet the same noise.
        assert torch.equal(gumbel_noise(keys, n), every[..., :n])
    assert every.max() < NOISE_MOST


@pytest.mark.parametrize("vocab", [3000, 30_000])
def test_a_nucleus_that_ends_at_a_token_is_told_exactly(vocab: int) -> None:
    """Two equals come after four: whether they are in decides a sum that is off by no bit."""
    logits = torch.full((1, 400, vocab), -40.0)
    logits[..., :4] = 0.0
    logits[..., 4:6] = -2.0
    positions = torch.arange(400)[None]
    unit = 2.0**-34
    before = 4 / (4 + 2 * math.floor(logits[0, 0, 4].exp().item() / unit) * unit)
    seen = {}
    for name, change in {"below": -1e-15, "above": 1e-15}.items():
        params = [Sampling(temperature=1.0, top_p=before + change, seed=1)]
        seen[name] = set(chosen(logits, params, positions)[0].tolist())
    assert seen == {"below": {0, 1, 2, 3}, "above": {0, 1, 2, 3, 4, 5}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 64), (8, 5, 4096), (5, 2, 4001)])
def test_the_best_is_the_first_of_equals(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul_(2).round_()
    scores = scores.to(dtype)
    scores[0, 0] = -torch.inf
    best = scores.amax(dim=-1, keepdim=True)
    places = torch.arange(shape[-1]).expand(shape)
    first = places.masked_fill(scores != best, shape[-1]).amin(dim=-1)
    assert torch.equal(first_best(scores), first)
    scores[0, 0, 7], scores[0, 0, 9] = torch.nan, torch.inf
    assert first_best(scores)[0, 0] == scores[0, 0].argmax() == 7


def test_a_batch_has_no_filters_of_greedy_rows_and_none_of_those_that_keep_all() -> None:
    filters = {"top_k": 9, "top_p": 0.5, "min_p": 0.25}
    greedy, plain = Sampling(**filters), Sampling(temperature=2.0, seed=7)
    batch = SamplingBatch.of([greedy, plain], CPU)
    assert (batch.any_sampled, batch.top_k_max) == (True, 0)
    assert not batch.any_top_p
    assert not batch.any_min_p
    batch = SamplingBatch.of([greedy, plain, Sampling(temperature=0.5, seed=8, **filters)], CPU)
    assert (batch.top_k_max, batch.any_top_p, batch.any_min_p) == (9, True, True)
    assert batch.noisy.flatten().tolist() == [0, 1, 1]
    assert batch.top_k.flatten().tolist() == [0, 0, 9]
    assert batch.top_p.flatten().tolist() == [math.inf, math.inf, 0.5]
    assert batch.min_p.flatten().tolist() == [0, 0, 0.25]


def test_a_row_chooses_among_others_as_alone() -> None:
    params = [Sampling(), *PARAMS, Sampling(temperature=1.0, top_k=3, seed=9), Sampling(seed=3)]
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(params), 40, 300, generator=generator) * 2
    positions = torch.arange(40).expand(len(params), -1)
    for row, found in enumerate(chosen(logits, params, positions)):
        alone = chosen(logits[row : row + 1], [params[row]], positions[:1])[0]
        assert torch.equal(found, alone), params[row]


def test_more_tokens_than_there_are_may_be_asked_for() -> None:
    logits, positions = some_logits().expand(1, 50, -1), torch.arange(50)[None]
    every = [Sampling(temperature=2.0, seed=1)], [Sampling(temperature=2.0, seed=1, top_k=99)]
    assert torch.equal(*(chosen(logits, params, positions) for params in every))


def test_what_lies_on_the_edge_of_min_p_is_kept_and_on_that_of_top_p_is_not() -> None:
    """Also where the likeliest tokens do not hold all of the equals."""
    edge = torch.tensor(0.25).log().item()
    logits = torch.full((1, 400, 2000), edge)
    logits[..., 0] = 0.0
    positions = torch.arange(400)[None]
    params = Sampling(temperature=1.0, min_p=0.25, seed=1)
    found = chosen(logits, [params], positions)[0].tolist()
    assert found == [by_definition(logits[0, at], params, at) for at in range(400)]
    assert max(found) > 1000
    half = torch.tensor([0.0, -math.log(2), -math.log(2)])
    assert half.exp().tolist() == [1.0, 0.5, 0.5]
    params = Sampling(temperature=1.0, top_p=0.5, seed=1)
    assert not chosen(half.expand(1, 400, -1), [params], positions).any()
