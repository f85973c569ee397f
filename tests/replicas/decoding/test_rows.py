"""Proves that logits are changed place by place as `Decoding` defines it, and that a state which
went along with its row is the one made anew from its content."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from replicas.decoding import DecodingRows, RowState, token_logprobs
from scheduler.decoding import Decoding

VOCAB = 12
tokens = st.integers(0, VOCAB - 1)
penalties = st.sampled_from([0.0, 0.5, -1.5])


@st.composite
def decodings(draw: st.DrawFn) -> tuple[Decoding, list[int], list[int]]:
    """With a content and a draft."""
    content = draw(st.lists(tokens, min_size=1, max_size=8))
    words = st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)
    biases = st.lists(st.tuples(tokens, st.floats(-5, 5)), max_size=3, unique_by=lambda p: p[0])
    decoding = Decoding(
        prompt_tokens=draw(st.integers(1, len(content))),
        logit_bias=tuple(draw(biases)),
        repetition_penalty=draw(st.sampled_from([1.0, 2.0, 0.5])),
        frequency_penalty=draw(penalties),
        presence_penalty=draw(penalties),
        min_tokens=draw(st.integers(0, 6)),
        bad_words=draw(words),
    )
    return decoding, content, draw(st.lists(tokens, max_size=4))


ENDS = frozenset({3, 7})


def by_definition(
    decoding: Decoding, content: list[int], draft: list[int], logits: torch.Tensor
) -> list[list[float]]:
    found = []
    for place in range(1 + len(draft)):
        new = [*content[decoding.prompt_tokens :], *draft[:place]]
        there = {*content, *draft[:place]}
        row = logits[place].tolist()
        for token, score in enumerate(row):
            factor = decoding.repetition_penalty if token in there else 1.0
            score = score / factor if score > 0 else score * factor
            score -= decoding.frequency_penalty * new.count(token)
            score -= decoding.presence_penalty * (token in new)
            score += dict(decoding.logit_bias).get(token, 0.0)
            struck = token in ENDS and len(new) < decoding.min_tokens
            for *rest, last in decoding.bad_words:
                before = new[len(new) - len(rest) :] if len(rest) <= len(new) else None
                struck = struck or (token == last and before == rest)
            row[token] = -math.inf if struck else score
        found.append(row)
    return found


@settings(deadline=None)
@given(decodings())
def test_each_place_is_changed_as_defined_given_the_draft_before_it(
    case: tuple[Decoding, list[int], list[int]],
) -> None:
    decoding, content, draft = case
    logits = torch.randn(1 + len(draft), VOCAB) * 3
    got = logits.clone()
    RowState(decoding, content, ENDS, None, drafts=True).adjust(got, draft)
    for row, expected in zip(got.tolist(), by_definition(*case, logits), strict=True):
        assert row == pytest.approx(expected, abs=1e-4)


@settings(deadline=None)
@given(decodings(), st.lists(tokens, min_size=1, max_size=5))
def test_a_state_that_is_told_what_was_committed_is_the_one_made_anew(
    case: tuple[Decoding, list[int], list[int]], committed: list[int]
) -> None:
    decoding, content, draft = case
    kept = RowState(decoding, content, ENDS, None, drafts=True)
    for token in committed:
        kept.commit([token])
        content.append(token)
    anew = RowState(decoding, list(content), ENDS, None, drafts=True)
    logits = torch.randn(1 + len(draft), VOCAB) * 3
    one, other = logits.clone(), logits.clone()
    kept.adjust(one, draft)
    anew.adjust(other, draft)
    assert torch.equal(one, other)


def test_penalties_strike_no_token_out_whatever_the_dtype() -> None:
    decoding = Decoding(1, repetition_penalty=1e-6)
    logits = torch.full((1, VOCAB), 3e4, dtype=torch.float16)
    RowState(decoding, [5], ENDS, None, drafts=True).adjust(logits, [])
    assert logits.isfinite().all()
    assert logits[0, 5] == torch.finfo(torch.float16).max


def test_masks_leave_what_they_allow_in_their_places_and_nothing_changes_behind_them() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((3, VOCAB), generator=generator)
    allowed = torch.rand((2, VOCAB), generator=generator) < 0.5
    masks = [np.packbits(mask.numpy(), bitorder="little") for mask in allowed]
    got = logits[:1].clone()
    RowState(Decoding(1), [5], ENDS, None, drafts=True).adjust(got, [], masks)
    assert torch.equal(got, logits[:1].masked_fill(~allowed[:1], -torch.inf)), "of a longer draft"
    got = logits.clone()
    RowState(Decoding(1), [5], ENDS, None, drafts=True).adjust(got, [1, 2], masks)
    assert torch.equal(got[2], logits[2])
    assert torch.equal(got[:2], logits[:2].masked_fill(~allowed, -torch.inf))


def test_rows_are_told_of_the_logits_before_any_change_of_what_they_commit() -> None:
    """Rows that ask for nothing are left as they are."""
    told = Decoding(1, logprobs=2)
    changed = Decoding(1, logprobs=0, logit_bias=((4, 50.0),))
    silent = Decoding(1, logit_bias=((4, 50.0),))
    states = [
        None if state is None else RowState(state, [1, 2], ENDS, None, drafts=True)
        for state in (told, None, changed, silent)
    ]
    rows = DecodingRows(states)
    assert not rows.drafts
    plain = torch.randn(4, 3, VOCAB)
    for _ in range(2):
        logits = plain.clone()
        for row in range(4):
            rows.adjust(row, [0, 6], logits[row])
        same = [torch.equal(logits[row], plain[row]) for row in range(4)]
        assert same == [True, True, False, False]
        rows.commit([[0, 6, 9], [1], [4], [4, 4]])
    assert rows.extras[0] == 2 * list(token_logprobs(plain[0], [0, 6, 9], 2))
    assert rows.extras[2] == 2 * list(token_logprobs(plain[2][:1], [4], 0))
    assert (rows.extras[1], rows.extras[3]) == ([], [])
    assert not rows.failures


def test_logits_are_copied_only_where_they_are_told_and_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda x: copies.append(x) or clone(x))
    bias = ((4, 50.0),)
    kinds = (
        Decoding(1, logprobs=2),
        Decoding(1, logit_bias=bias),
        Decoding(1, logprobs=2, logit_bias=bias),
    )
    for told in kinds:
        rows = DecodingRows([RowState(told, [1, 2], ENDS, None, drafts=True)])
        rows.adjust(0, [], torch.zeros(1, VOCAB))
    assert len(copies) == 1


CHANGES = {
    "logit_bias": ((1, 1.0),),
    "repetition_penalty": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "min_tokens": 1,
    "bad_words": ((1,),),
    "grammar": "x",
}


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_alone_changes_logits_and_to_be_told_of_them_does_not(field: str) -> None:
    assert Decoding(1, **{field: CHANGES[field]}).changes_logits
    assert not Decoding(1, logprobs=1, prompt_logprobs=1).changes_logits
