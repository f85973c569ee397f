"""Proves: `text_offset` says of each token where in the text the character is that it begins or
goes on with: all tokens of one character have its place, whatever bytes they hold, and none is
before the place of an earlier one; also where bytes are no text, and where the prompt is repeated.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer

from cluster.frontend.http_api.text_offsets import TextOffsets
from cluster.frontend.text import Detokenizer
from tests.cluster.frontend.http_rig import numbered, post, served_tiny, tiny_text, together
from tests.cluster.frontend.test_text import (
    FALLBACK,
    FALLBACK_IDS,
    RUNS,
    WHOLE,
    A,
    byte,
    cut,
    tokenizer_of,
)

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def placed(
    made: Tokenizer,
    prompt: list[int],
    tokens: list[int],
    said: list[bytes],
    before: bytes = b"",
) -> tuple[list[int], str]:
    """The places of tokens with these bytes, and their text; `before`: those of the prompt."""
    detokenizer = Detokenizer(made, prompt)
    offsets = TextOffsets(Detokenizer(made, prompt), before)
    places = [offsets.place(*each) for each in zip(tokens, said, strict=True)]
    text = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
    assert offsets.end == len(text)
    assert places == sorted(places)
    assert not places or (places[0] == 0 and places[-1] <= len(text))
    return places, text


@given(WHOLE, SIZES, st.booleans(), st.data())
def test_tokens_of_a_character_have_its_place(
    said: str, sizes: list[int], fallback: bool, data: st.DataObject
) -> None:
    """In the answer alone: a character that the prompt has begun is its first one."""
    parts = cut(said.encode(), [1] if fallback else sizes)
    made, tokens = tokenizer_of(parts)
    if fallback:
        made, tokens = FALLBACK, [byte(part[0]) for part in parts]
    at = data.draw(st.integers(0, len(parts)))
    places, text = placed(made, tokens[:at], tokens[at:], parts[at:], b"".join(parts[:at]))
    before = [len(b"".join(parts[:place]).decode(errors="ignore")) for place in range(len(parts))]
    assert places == [place - before[at] for place in before[at:]]
    assert text == said[before[at] :] if at < len(parts) else text == ""


@given(RUNS, SIZES)
def test_letters_have_their_place_behind_bytes_that_are_no_text(
    runs: list[tuple[bytes, int]], sizes: list[int]
) -> None:
    parts = cut(b"".join(part * count for part, count in runs), sizes)
    made, tokens = tokenizer_of(parts)
    places, text = placed(made, [], tokens, parts)
    for part, place in zip(parts, places, strict=True):
        if part.isascii():
            assert text[place:].startswith(part.decode())


@given(st.lists(FALLBACK_IDS, max_size=24))
def test_words_have_their_place_behind_byte_tokens_that_are_no_text(tokens: list[int]) -> None:
    tokens = [A, *tokens]
    names = [FALLBACK.id_to_token(token).replace("\u2581", " ") for token in tokens]
    said = [bytes([int(name[3:5], 16)]) if name[0] == "<" else name.encode() for name in names]
    places, text = placed(FALLBACK, [], tokens, said)
    for name, place in zip(names, places, strict=True):
        if name[0] != "<":
            assert text[place:].startswith(name)


# --------------------------------------------------------------------------- answers

WRITTEN = "a日本語。é"
"""Of single bytes in the tiny target's tokens."""


@pytest.mark.parametrize("as_tokens", [True, False])
async def test_an_echo_tells_the_places_of_its_characters(as_tokens: bool) -> None:
    async with served_tiny() as (_made, app):
        ids = list(tiny_text().encode(WRITTEN))
        sizes = [len(tiny_text().token_bytes(token)) for token in ids]
        ends = accumulate(sizes, initial=0)
        written = WRITTEN.encode()
        right = [len(written[:end].decode(errors="ignore")) for end in ends]
        prompt = ids if as_tokens else WRITTEN
        fields: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
        [choice] = (await post(app, "completions", **fields)).json["choices"]
        assert choice["logprobs"]["text_offset"] == right
        assert len(set(right)) < len(right)


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize(
    ("begun", "then", "text", "answer", "right"),
    [
        (2, "日"[:1], "日", "日", [0]),
        (1, "a", "\ufffda", "a", [1]),
    ],
    ids=["completed", "never whole"],
)
async def test_an_echo_and_its_answer_are_one_text(
    echo: bool, begun: int, then: str, text: str, answer: str, right: list[int]
) -> None:
    """`begun`: bytes of a character that the prompt ends with; one token follows."""
    async with served_tiny() as (_made, app):
        first, character = list(tiny_text().encode("x")), list(tiny_text().encode("日"))
        [*_, follows] = tiny_text().encode(then)
        fields: dict[str, Any] = {
            "prompt": first + character[:begun],
            "logit_bias": {str(follows): 100},
            "max_tokens": 1,
            "echo": echo,
            "logprobs": 0,
        }
        [choice] = (await post(app, "completions", **fields)).json["choices"]
        assert choice["text"] == ("x" + text if echo else answer)
        before = [0] + [1] * begun
        of_answer = [place + 1 for place in right] if echo else [0]
        assert choice["logprobs"]["text_offset"] == (before if echo else []) + of_answer
        streamed = together(numbered(await post(app, "completions", **fields, stream=True)))
        [parts] = streamed["choices"].values()
        assert parts["text"] == choice["text"]
        places = [row[3] for row in parts["logprobs"]]
        assert places == choice["logprobs"]["text_offset"]
