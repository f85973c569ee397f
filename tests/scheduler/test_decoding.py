"""Proves that a request which asks for another choice of tokens is known as such, and that what is
told of tokens comes out as it went in."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.decoding import ENTRY, Decoding, TokenLogprobs


@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": ((3, 0.0),)},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -0.5},
        {"presence_penalty": 0.5},
        {"min_tokens": 1},
        {"bad_words": ((3,),)},
        {"allowed_token_ids": (3,)},
        {"grammar": "{}"},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_each_change_of_logits_is_known_by_itself(asked: dict[str, Any]) -> None:
    assert Decoding(4, **asked).changes_logits is True


@pytest.mark.parametrize("told", [{}, {"logprobs": 5}, {"prompt_logprobs": 0}])
def test_what_is_only_told_changes_nothing(told: dict[str, Any]) -> None:
    assert Decoding(4, **told).changes_logits is False


def test_log_probabilities_are_read_as_they_were_packed_and_counted() -> None:
    """The token's own is one of them."""
    top = ((7, -0.5), (3, -1.25))
    told = TokenLogprobs(-1.25, 2, b"".join(ENTRY.pack(*each) for each in top))
    assert (told.top, told.told) == (top, 3)
    assert TokenLogprobs(-1.25, 2).told == 1
