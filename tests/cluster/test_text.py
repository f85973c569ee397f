"""Proves: text never breaks a character, ends before stop strings, and ignores chunk borders."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

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


def byte_fallback_tokenizer() -> Tokenizer:
    """Words, and a token for each byte, decoded as Llama's tokenizers do."""
    words = ["<unk>", "a", "bc", "\u2581", "\u2581d", "\u2581ef", "\u00e9"]
    names = words + [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {name: index for index, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


FALLBACK = byte_fallback_tokenizer()
WORDS = range(1, 7)


def byte(value: int) -> int:
    token: int = FALLBACK.token_to_id(f"<0x{value:02X}>")
    return token


A = FALLBACK.token_to_id("a")
FALLBACK_TOKENS = st.lists(
    st.one_of(
        st.sampled_from(WORDS),
        st.sampled_from([0x0A, 0x20, 0x41, 0xE4, 0xB8, 0xAD, 0xC3, 0xA9, 0x80]).map(byte),
    ),
    max_size=24,
)


def pieces(tokens: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(FALLBACK, prompt)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


def test_a_bad_byte_changes_nothing_that_was_given_out() -> None:
    tokens = [byte(0x0A), byte(0xE4), A, A]
    assert pieces(tokens, [A]) == ["\n", "", "\ufffda", "a", ""]
    tokens = [byte(0xE4), byte(0xB8), byte(0xAD), byte(0x80)]
    assert pieces(tokens, [A]) == ["", "", "\u4e2d", "", "\ufffd"]


@given(tokens=FALLBACK_TOKENS, prompt=FALLBACK_TOKENS)
def test_any_tokens_of_a_byte_fallback_tokenizer_have_a_text(
    tokens: list[int], prompt: list[int]
) -> None:
    def decode(count: int) -> str:
        text: str = FALLBACK.decode(context + tokens[:count])
        return text[len(FALLBACK.decode(context)) :]

    context = [] if FALLBACK.decode(prompt[-16:]).endswith("\ufffd") else prompt[-16:]
    given_out = pieces(tokens, prompt)
    text = "".join(given_out)
    # The decoder may change earlier text; up to there it and the pieces agree.
    whole = decode(len(tokens))
    agreed = len(whole)
    for count in range(len(tokens)):
        if not (part := decode(count)).endswith("\ufffd"):
            while part[:agreed] != whole[: min(agreed, len(part))]:
                agreed -= 1
            if not whole.startswith(part):
                break
    else:
        # A bad byte may change the text of the prompt's bytes, too: then there is no whole.
        before = FALLBACK.decode(context)
        if FALLBACK.decode(context + tokens).startswith(before):
            assert text == whole
        else:
            agreed = 0
    assert text[:agreed] == whole[:agreed]
    # Nothing is lost and nothing repeated.
    for word in ("a", "bc", "d", "ef"):
        spelled = sum(word in FALLBACK.id_to_token(token) for token in tokens if token in WORDS)
        assert text.count(word) == spelled


def test_a_prompt_that_ends_within_a_character_is_not_repeated() -> None:
    for encoder, prompt in (
        (tokenizer(), ids("the quick \U0001f98a")[:-1]),
        (FALLBACK, [A, A, byte(0xE4)]),
    ):
        token = encoder.token_to_id("a")
        detokenizer = Detokenizer(encoder, prompt)
        assert detokenizer.push(token) + detokenizer.push(token) + detokenizer.flush() == "aa"


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
