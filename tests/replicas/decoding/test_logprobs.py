"""Proves: log-probabilities of large vocabularies are those of a full sort, however many places are
asked for at once. Small ones are compared with transformers in `tests/oracle/test_decoding.py`."""

from __future__ import annotations

import pytest
import torch

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
