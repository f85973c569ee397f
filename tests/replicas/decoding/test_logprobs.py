"""Proves: log-probabilities of large vocabularies are those of a full sort, however many places are
asked for at once. Small ones are compared with transformers in `tests/oracle/test_decoding.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from replicas.decoding import token_logprobs


@pytest.mark.parametrize("vocab", [512, 1031, 50_257])
@pytest.mark.parametrize("tied", [False, True])
def test_the_likeliest_are_the_first_of_a_full_sort(vocab: int, tied: bool) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab) * 3
    # Of tied ones the lower id is first; so few that all ties of the last place are looked at.
    logits = logits.round(decimals=2) if tied else logits
    tokens = [0, vocab - 1, 5, 5, 300, vocab // 2]
    plain = logits.double().log_softmax(-1)
    together = token_logprobs(logits, tokens, 5)
    for place, (token, said) in enumerate(zip(tokens, together, strict=True)):
        assert (said,) == token_logprobs(logits[place : place + 1], [token], 5)
        assert said.rank == 1 + int((logits[place] > logits[place, token]).sum())
        row = logits[place].tolist()
        best = sorted(range(vocab), key=lambda token, row=row: (-row[token], token))[:5]
        assert [token for token, _ in said.top] == best
        assert [logprob for _, logprob in said.top] == pytest.approx(
            plain[place, best].tolist(), abs=1e-5
        )
        assert said.logprob == pytest.approx(float(plain[place, token]), abs=1e-5)
        assert dict(said.top).get(token, said.logprob) == said.logprob


@pytest.mark.parametrize("vocab", [512, 50_257])
@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_vocabulary_begins_with_the_likeliest_to_the_last_bit(
    vocab: int, tied: bool
) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(7, vocab) * 3
    logits = logits.round(decimals=2) if tied else logits
    tokens = [0, vocab - 1, 5, 5, 300, vocab // 2, 9]
    few = token_logprobs(logits, tokens, 5)
    for place, said in enumerate(token_logprobs(logits, tokens, -1)):
        assert (said.logprob, said.rank) == (few[place].logprob, few[place].rank)
        assert said.top[:5] == few[place].top
        assert said.told == 1 + vocab
        assert sorted(token for token, _ in said.top) == list(range(vocab))
        assert dict(said.top)[tokens[place]] == said.logprob
        assert list(said.top) == sorted(said.top, key=lambda entry: (-entry[1], entry[0]))
    assert token_logprobs(logits, tokens, vocab + 9) == token_logprobs(logits, tokens, -1)


class Made(TorchDispatchMode):
    """The number of elements of each tensor of whole numbers that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.sizes += [x.numel() for x in tensors if x.dtype is torch.int64]
        return out


def test_a_whole_vocabulary_is_sorted_a_few_places_at_a_time() -> None:
    """All of a long prompt at once would take gigabytes."""
    logits = torch.randn(24, 50_000, generator=torch.Generator().manual_seed(1))
    with Made() as made:
        token_logprobs(logits, [7] * 24, -1)
    assert max(made.sizes) <= 10 * 50_000


def test_of_no_place_nothing_is_told() -> None:
    """As of a prompt of one token."""
    assert token_logprobs(torch.empty(0, 512), [], 5) == ()
