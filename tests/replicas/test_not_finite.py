"""Proves that a row whose activations leave float16's range fails alone, if at all.

Rows read each other's leavings at masked positions: padding in the scrap block, what an earlier
owner left in a block. A token stands in for the overflow: its embedding is infinite. The others'
tokens are compared with a run without such a row, in the deterministic mode, where batch mates
change not a bit.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from replicas.config import ReplicaConfig
from replicas.eqspec import of_numbers
from replicas.replica import Replica
from replicas.sampling.choice import SamplingBatch, choose
from scheduler.messages import RowFailure, Sampling
from tests.replicas.pool import Client
from tests.tiny_pairs import DEVICE, pair_in, unrecorded

BEYOND = 90
"""The token that overflows."""
INNOCENT = {"b": list(range(3, 40)), "c": [7], "d": [8, 3, 60, 2, 2, 2]}


class Overflowing(Client):
    """With a replica that overflows at one token."""

    def __init__(self, deterministic: bool = True, **config: object) -> None:
        settings = {
            "device": DEVICE,
            "dtype": "float16",
            "block_size": 4,
            "num_gpu_blocks_override": 64,
        }
        settings |= {"prefix_sharing": False, "deterministic": deterministic, **config}
        super().__init__(Replica(pair_in(torch.float16, "qwen3"), ReplicaConfig(**settings)))
        runners = (self.replica.target, self.replica.drafter.model)
        self.models = [unrecorded(runner) for runner in runners]
        for paged in self.models:
            paged.model.get_input_embeddings().weight.data[BEYOND] = torch.inf

    def two_steps(self, k: int, names: str, ragged: bool = False) -> None:
        """`ragged`: only the first row drafts."""
        self.steps(k, 2, list(names), **dict.fromkeys(names[1:] if ragged else "", 0))

    def finite(self) -> bool:
        layers = [layer for model in self.models for layer in model.cache.layers]
        return all(bool(layer.isfinite().all()) for layer in layers)


def play(client: Overflowing, k: int, ragged: bool, guilty: bool) -> dict[str, list[int]]:
    """The innocent in one batch with the guilty, and then some in blocks that were theirs."""
    bad = {"a": [5, 9, BEYOND, 4, 11, 6], "z": [BEYOND] * 30} if guilty else {}
    client.prefill(**bad, **{name: INNOCENT[name] for name in "bc"})
    names = "abc" if guilty else "bc"
    client.two_steps(k, "cab" if guilty else "cb", ragged)
    assert client.finite()
    client.two_steps(k, names, ragged)
    client.replica.release(["a", "z"])
    client.prefill(d=INNOCENT["d"])
    client.two_steps(k, "dcb", ragged)
    assert client.finite()
    return {name: client.contents[name] for name in INNOCENT}


@cache
def without(graphs: str) -> dict[str, list[int]]:
    """What the innocent commit by themselves, however they draft."""
    return play(Overflowing(graphs=graphs), 3, False, guilty=False)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize(("k", "ragged"), [(0, False), (3, False), (3, True)])
def test_others_commit_what_they_would_without_it(graphs: str, k: int, ragged: bool) -> None:
    expected = without(graphs)
    got = play(Overflowing(graphs=graphs), k, ragged, guilty=True)
    for name, prompt in INNOCENT.items():
        n = min(len(got[name]), len(expected[name]))
        assert n >= len(prompt) + 2
        assert got[name][:n] == expected[name][:n]


@pytest.mark.parametrize("chunk", [3, 512])
def test_a_prefill_in_chunks_leaves_only_numbers(chunk: int) -> None:
    client = Overflowing(prefill_chunk_tokens=chunk)
    client.prefill(a=[BEYOND] * 9, b=INNOCENT["b"], c=[7, BEYOND, 7])
    assert client.finite()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_row_without_a_next_token_fails_and_the_others_go_on(fused: bool, ragged: bool) -> None:
    client = Overflowing(deterministic=not fused)
    joined = client.models[0].decoder is not None
    assert joined == (fused or DEVICE != "cpu"), "a GPU joins layers in both modes"
    client.prefill(a=[5, 9, BEYOND], b=INNOCENT["b"], c=INNOCENT["c"])
    client.two_steps(3, "cab", ragged)
    assert client.failures == {"a": RowFailure("the logits after 3 tokens are not finite")}
    assert len(client.contents["a"]) == 3
    assert all(len(client.contents[name]) > len(INNOCENT[name]) for name in "bc"), "in that step"
    client.failures.clear()
    client.two_steps(0, "a")
    assert list(client.failures) == ["a"]
    assert client.finite()
    alone = Overflowing(deterministic=not fused)
    alone.prefill(b=INNOCENT["b"], c=INNOCENT["c"])
    client.two_steps(3, "cb", ragged)
    for _ in range(2):
        alone.two_steps(3, "cb", ragged)
    for name in "bc":
        shorter = min(client.contents[name], alone.contents[name], key=len)
        assert len(shorter) >= len(INNOCENT[name]) + 3
        assert client.contents[name][: len(shorter)] == alone.contents[name][: len(shorter)]


def test_what_a_row_drafted_beyond_its_own_length_cannot_fail_it() -> None:
    """Padding and rejected tokens have logits, too: no committed token is chosen from them."""
    client = Overflowing(graphs="on")
    client.prefill(b=INNOCENT["b"], c=INNOCENT["c"])
    draft = client.replica.drafter.model
    forward = draft.forward

    def always_beyond(*args):  # type: ignore[no-untyped-def]
        out = forward(*args)
        out.logits[..., BEYOND] = torch.inf
        return out

    draft.forward = always_beyond  # type: ignore[method-assign]
    client.two_steps(3, "cb")
    alone = Overflowing()
    alone.prefill(b=INNOCENT["b"], c=INNOCENT["c"])
    alone.two_steps(0, "cb")
    assert client.contents == alone.contents


KINDS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.7, seed=3),
    "top_k": Sampling(temperature=0.7, top_k=5, seed=4),
    "top_p": Sampling(temperature=0.7, top_p=0.9, seed=5),
    "min_p": Sampling(temperature=0.7, min_p=0.1, seed=6),
}


@pytest.mark.parametrize("others", [["greedy"], list(KINDS)])
@pytest.mark.parametrize("guilty", KINDS)
@pytest.mark.parametrize("bad", ["one NaN", "all NaN", "all -inf"])
def test_no_token_is_chosen_from_logits_that_are_no_numbers(
    guilty: str, others: list[str], bad: str
) -> None:
    """One NaN among many logits is enough, wherever it stands and however the row is sampled."""
    params = [KINDS[name] for name in (*others, guilty)]
    sampling = SamplingBatch.of(params, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((len(params), 2, 50), generator=generator)
    noise = sampling.noise_after(torch.arange(2).expand(len(params), 2) + 7)
    well = of_numbers(choose(logits, sampling, noise), logits, sampling)
    assert bool((well >= 0).all())
    broken = logits.clone()
    where = slice(33, 34) if bad == "one NaN" else slice(None)
    broken[-1, 1, where] = -torch.inf if bad == "all -inf" else torch.nan
    got = of_numbers(choose(broken, sampling, noise), broken, sampling)
    assert got[-1, 1] < 0
    got[-1, 1] = well[-1, 1]
    assert torch.equal(got, well), "the others' choices stay"
