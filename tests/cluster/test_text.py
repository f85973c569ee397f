"""Proves: text never breaks a character, ends before stop strings, and ignores chunk borders."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.text import Detokenizer, StopStrings, TextStream
from tests.cluster.fakes import VOCAB, tokenizer

TOKENS = st.lists(st.integers(2, VOCAB - 1), max_size=40)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text).ids


def test_a_character_of_several_tokens_comes_whole() -> None:
    detokenizer = Detokenizer(tokenizer(), ids("x"))
    tokens = ids("a🦊b")
    assert len(tokens) > 4
    texts = [detokenizer.push(token) for token in tokens]
    assert "".join(texts) == "a🦊b"
    assert "🦊" in texts
    assert not any("\ufffd" in text for text in texts)


def test_bytes_that_never_become_a_character_come_at_the_end() -> None:
    detokenizer = Detokenizer(tokenizer(), ids("x"))
    tokens = ids("a🦊")[:-1]
    assert "".join(map(detokenizer.push, tokens)) == "a"
    assert detokenizer.flush() == tokenizer().decode(tokens)[1:]
    assert detokenizer.flush() == ""


@given(TOKENS)
def test_all_pushes_and_the_flush_give_the_whole_text(tokens: list[int]) -> None:
    prompt = ids("the quick")
    detokenizer = Detokenizer(tokenizer(), prompt)
    text = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
    assert "the quick" + text == tokenizer().decode(prompt + tokens)


@pytest.mark.parametrize("prompt", [[], [0], ids("🦊")[:2], [1, 1, 1]])
def test_any_prompt_can_come_before(prompt: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer(), prompt)
    assert "ab" in "".join(map(detokenizer.push, ids("ab"))) + detokenizer.flush()


def test_special_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(tokenizer(), [])
    assert detokenizer.push(1) + detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("stops", "pushes", "text", "found"),
    [
        ([], ["abc"], "abc", None),
        (["c"], ["abcd"], "ab", "c"),
        (["cd"], ["abc", "de"], "ab", "cd"),
        (["cd"], ["abc", "ce"], "abcce", None),
        (["aab"], ["aa", "ab"], "a", "aab"),
        (["xyz", "y"], ["xy"], "x", "y"),
        (["long stop"], ["long ", "st", "op here"], "", "long stop"),
        (["long stop"], ["long ", "st"], "long st", None),
        (["\n\n"], ["a\n", "\nb"], "a", "\n\n"),
    ],
)
def test_text_ends_before_a_stop_string(
    stops: list[str], pushes: list[str], text: str, found: str | None
) -> None:
    strings = StopStrings(stops)
    out = ""
    hit = None
    for piece in pushes:
        safe, hit = strings.push(piece)
        out += safe
        if hit:
            break
    assert (out + ("" if hit else strings.flush()), hit) == (text, found)


def test_nothing_is_given_out_that_may_begin_a_stop_string() -> None:
    strings = StopStrings(["END"])
    assert strings.push("some E") == ("some ", None)
    assert strings.push("N") == ("", None)
    assert strings.push("T") == ("ENT", None)


@given(
    tokens=TOKENS,
    stops=st.lists(st.text("abo \n", min_size=1, max_size=4), max_size=3),
    seed=st.integers(),
)
def test_chunk_borders_change_nothing(tokens: list[int], stops: list[str], seed: int) -> None:
    whole = TextStream(tokenizer(), ids("the"), stops)
    piece = whole.push(tokens)
    expected = (piece.text + ("" if piece.stop else whole.finish().text), piece.tokens)

    draw = random.Random(seed)
    stream = TextStream(tokenizer(), ids("the"), stops)
    text, used, at = "", 0, 0
    while at < len(tokens):
        size = draw.randint(1, 5)
        part = stream.push(tokens[at : at + size])
        text += part.text
        used += part.tokens
        at += size
        if part.stop:
            break
    else:
        text += stream.finish().text
    assert (text, used) == expected


@given(tokens=TOKENS, cut=st.integers(0, 40))
def test_a_stream_taken_up_elsewhere_goes_on_where_it_was(tokens: list[int], cut: int) -> None:
    first = TextStream(tokenizer(), ids("the"), ["zzz"])
    before = first.push(tokens[:cut]).text
    after = first.push(tokens[cut:]).text + first.finish().text

    second = TextStream(tokenizer(), ids("the"), ["zzz"])
    assert second.push(tokens[:cut]).text == before
    assert second.push(tokens[cut:]).text + second.finish().text == after
