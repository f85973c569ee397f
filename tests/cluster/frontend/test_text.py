"""Proves: text never breaks a character, ends before stop strings, and ignores chunk borders.

And what it costs grows with the tokens, whatever they are.
"""

from __future__ import annotations

from itertools import accumulate, cycle
from typing import Any, cast

import pytest
from hypothesis import example, given, strategies as st
from tokenizers import Tokenizer, decoders, models

from cluster.frontend.text import HELD_MAX, Detokenizer, TextRules, TextStream
from tests.cluster.fakes import EOS, VOCAB, tokenizer

TOKENS = st.lists(st.integers(2, VOCAB - 1), max_size=40)
SPECIAL = (0, 1)
NO_TOKEN = VOCAB + 3
"""As the padding of an embedding has: the tokenizer does not know it."""


def ids(text: str) -> list[int]:
    return tokenizer().encode(text).ids


def metaspace_tokenizer() -> Tokenizer:
    """Words that bring their space along, and lose it where a text begins."""
    words = ["<s>", "</s>", "\u2581", "\u2581a", "b", "\u2581\u2581", "", "\u00e9"]
    made = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.add_special_tokens(["<s>", "</s>"])
    return made


METASPACE = metaspace_tokenizer()


@given(data=st.data(), kind=st.sampled_from(["bytes", "words", "fallback"]))
def test_special_and_unknown_tokens_change_no_text_around_them(
    data: st.DataObject, kind: str
) -> None:
    made, texts, hidden = {
        "bytes": (tokenizer(), st.integers(2, VOCAB - 1), [*SPECIAL, NO_TOKEN]),
        "words": (METASPACE, st.integers(2, METASPACE.get_vocab_size() - 1), [0, 1, 100]),
        "fallback": (SPECIAL_FALLBACK, FALLBACK_IDS, [*SPECIAL_IDS, 5000]),
    }[kind]
    prompt = data.draw(st.lists(texts, max_size=5))
    tokens = data.draw(st.lists(st.one_of(texts, st.sampled_from(hidden)), max_size=40))
    shown = [token for token in tokens if token not in hidden]

    def text(tokens: list[int]) -> str:
        detokenizer = Detokenizer(made, prompt)
        return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()

    assert text(tokens) == text(shown)
    assert made.decode(prompt + tokens) == made.decode(prompt + shown)
    if kind != "fallback" and not (before := made.decode(prompt)).endswith("\ufffd"):
        assert before + text(tokens) == made.decode(prompt + tokens)


def bytes_of(*values: int) -> list[int]:
    """Tokens of single bytes in the byte-level tokenizer."""
    names = [byte_names()[value] for value in values]
    return [cast(int, tokenizer().token_to_id(name)) for name in names]


def byte_names() -> list[str]:
    """What byte-level tokenizers write for each byte: printable ones themselves, others beyond."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(value if value in plain else next(others)) for value in range(256)]


def tokenizer_of(parts: list[bytes]) -> tuple[Tokenizer, list[int]]:
    """A byte-level tokenizer with a token for each part, and those tokens."""
    words = ["".join(byte_names()[byte] for byte in part) for part in parts]
    vocab = {word: id for id, word in enumerate(dict.fromkeys(words))}
    made = Tokenizer(models.BPE(vocab, []))
    made.decoder = decoders.ByteLevel()
    return made, [vocab[word] for word in words]


PARTS = [bytes([value]) for value in (0x80, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0xA6, 0x8A, 0xC3, 0xFF)]
PARTS += [letter.encode() for letter in "a\u00e9\u4e2d\U0001f98a"]
COUNTS = st.integers(1, 4) | st.integers(1, HELD_MAX + 9)
RUNS = st.lists(st.tuples(st.sampled_from(PARTS), COUNTS), max_size=6)


@given(RUNS, st.lists(st.integers(1, 4), min_size=1))
@example([(b"\xad\xe4\xb8", 80)], [3])
@example([(b"\x80", HELD_MAX - 2), (b"\xe4\xb8\xada", 1)], [1])
@example([(b"\x80", HELD_MAX - 1), (b"\xe4\xb8\xada", 1)], [1])
def test_any_bytes_have_the_text_of_the_whole_however_tokens_cut_them(
    runs: list[tuple[bytes, int]], sizes: list[int]
) -> None:
    """`sizes`: bytes of each token, over and over."""
    said = b"".join(part * count for part, count in runs)
    made, tokens = tokenizer_of([b"x", *cut(said, sizes)])
    detokenizer = Detokenizer(made, tokens[:1])
    text = "".join(map(detokenizer.push, tokens[1:])) + detokenizer.flush()
    assert "x" + text == made.decode(tokens)


class Counting:
    """A tokenizer that counts the tokens that it is given to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(tokens)
        return cast(str, self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize(
    "kind",
    ["special", "unknown", "bad", "open", "straddling", "text", "empty", "fallback", "after text"],
)
def test_no_token_makes_those_after_it_dearer(kind: str) -> None:
    made, tokens = {
        "special": (tokenizer(), [0]),
        "unknown": (tokenizer(), [NO_TOKEN]),
        "bad": (tokenizer(), bytes_of(0x80)),
        "open": (tokenizer(), bytes_of(0xF0, 0x9F, 0xA6)),
        # It ends a character and begins the next.
        "straddling": tokenizer_of([bytes([0xAD, 0xE4, 0xB8])]),
        "text": (tokenizer(), ids("the quick \U0001f98a")),
        "empty": (METASPACE, [6]),
        "fallback": (FALLBACK, [byte(0x80), byte(0x0A)]),
        "after text": (FALLBACK, [byte(0x80)] * 200 + [A]),
    }[kind]
    counting = Counting(made)
    detokenizer = Detokenizer(cast(Tokenizer, counting), [])
    most = 0
    for token in (tokens * 5000)[:5000]:
        before = counting.decoded
        detokenizer.push(token)
        most = max(most, counting.decoded - before)
    before = counting.decoded
    detokenizer.flush()
    assert max(most, counting.decoded - before) <= 4 * HELD_MAX
    assert counting.decoded <= 5000 * HELD_MAX


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
SPECIAL_FALLBACK = byte_fallback_tokenizer()
SPECIAL_FALLBACK.add_special_tokens(["<s>", "</s>"])
SPECIAL_IDS = [SPECIAL_FALLBACK.token_to_id(name) for name in ("<s>", "</s>")]


def byte(value: int) -> int:
    token: int = FALLBACK.token_to_id(f"<0x{value:02X}>")
    return token


A = FALLBACK.token_to_id("a")
FALLBACK_IDS = st.sampled_from(WORDS) | st.sampled_from(b"\n A\xe4\xb8\xad\xc3\xa9\x80").map(byte)
FALLBACK_TOKENS = st.lists(FALLBACK_IDS, max_size=24)


def pieces(tokens: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(FALLBACK, prompt)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


def test_a_bad_byte_changes_nothing_that_was_given_out() -> None:
    tokens = [byte(0x0A), byte(0xE4), A, A]
    assert pieces(tokens, [A]) == ["\n", "", "\ufffda", "a", ""]
    tokens = [byte(0xE4), byte(0xB8), byte(0xAD), byte(0x80)]
    assert pieces(tokens, [A]) == ["", "", "\u4e2d", "", "\ufffd"]


def test_good_bytes_that_a_bad_one_spoiled_are_text_again_at_last() -> None:
    given_out = pieces([byte(0x80), *[byte(0x0A)] * 200, A], [])
    assert "".join(given_out) == "\ufffd" * HELD_MAX + "\n" * (201 - HELD_MAX) + "a"


@given(tokens=FALLBACK_TOKENS, prompt=FALLBACK_TOKENS)
def test_any_tokens_of_a_byte_fallback_tokenizer_have_a_text(
    tokens: list[int], prompt: list[int]
) -> None:
    prompt = prompt[-16:]
    decoded = [FALLBACK.decode(prompt + tokens[:count]) for count in range(len(tokens) + 1)]
    text = "".join(pieces(tokens, prompt))
    # A byte may change earlier text, the prompt's too: then there is no whole.
    settled = [text for text in decoded[1:] if not text.endswith("\ufffd")]
    if all(map(decoded[-1].startswith, decoded[:1] + settled)):
        assert decoded[0] + text == decoded[-1]
    # Nothing is lost and nothing repeated.
    for word in ("a", "bc", "d", "ef"):
        spelled = sum(word in FALLBACK.id_to_token(token) for token in tokens if token in WORDS)
        assert text.count(word) == spelled


def test_the_end_of_a_prompt_within_a_character_that_is_never_whole_is_not_repeated() -> None:
    token, detokenizer = ids("a")[0], Detokenizer(tokenizer(), ids("the quick \U0001f98a")[:-1])
    assert detokenizer.push(token) + detokenizer.push(token) + detokenizer.flush() == "aa"


CHARS = st.sampled_from("a \n\u00e9\u4e2d\u65e5\U0001f98a")
WHOLE = st.lists(CHARS, max_size=24).map(lambda chars: "".join(["a", *chars]))
"""A decoder may drop a space at the beginning."""


def cut(said: bytes, sizes: list[int]) -> list[bytes]:
    """Into parts of these sizes, over and over."""
    parts, every = [], cycle(sizes)
    while said:
        size = next(every)
        parts.append(said[:size])
        said = said[size:]
    return parts


@given(WHOLE, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans(), st.data())
def test_an_answer_begins_with_the_character_that_it_makes_whole(
    said: str, sizes: list[int], fallback: bool, data: st.DataObject
) -> None:
    """And a prompt that is repeated up to that character goes on with the answer."""
    if fallback:
        made, tokens = FALLBACK, [byte(value) for value in said.encode()]
        parts = cut(said.encode(), [1])
    else:
        parts = cut(said.encode(), sizes)
        made, tokens = tokenizer_of(parts)
    at = data.draw(st.integers(0, len(tokens)))
    chars = len(b"".join(parts[:at]).decode(errors="ignore"))
    detokenizer = Detokenizer(made, tokens[:at])
    text = "".join(map(detokenizer.push, tokens[at:])) + detokenizer.flush()
    assert text == said[chars:]
    again = Detokenizer(made, tokens[:at])
    taken = again.take_from_prompt()
    shown = made.decode(tokens[: at - taken])
    assert shown + "".join(map(again.push, tokens[at:])) + again.flush() == said


@given(RUNS, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_prompt_and_answer_are_the_whole_also_of_bad_bytes(
    runs: list[tuple[bytes, int]], sizes: list[int], data: st.DataObject
) -> None:
    made, tokens = tokenizer_of(cut(b"".join(part * count for part, count in runs), sizes))
    at = data.draw(st.integers(0, len(tokens)))
    whole, prompt = made.decode(tokens), made.decode(tokens[:at])
    detokenizer = Detokenizer(made, tokens[:at])
    text = "".join(map(detokenizer.push, tokens[at:])) + detokenizer.flush()
    # A character that was not whole is U+FFFD in the prompt, and whole in the answer.
    assert whole in (prompt + text, prompt[:-1] + text)
    assert not text or prompt + text == whole or prompt.endswith("\ufffd")


def test_a_word_keeps_its_space_behind_byte_tokens_of_more_characters_than_are_looked_at() -> None:
    assert pieces([A + 3], [A, *map(byte, "\u4e2d".encode() * 6)]) == [" d", ""]


WRITTEN = st.lists(st.sampled_from(ids("the quick brown fox jumps\n\nover")), max_size=20)


CUT = ids("the \u4e2d\U0001f98aquick")
"""Of single bytes, where a character is not ASCII."""


@given(TOKENS | WRITTEN, st.integers(1, len(CUT)), st.data())
def test_text_ends_before_the_first_stop_string_wherever_chunks_end(
    tokens: list[int], at: int, data: st.DataObject
) -> None:
    """Also where the prompt ends within a character. One that is whole within the first tokens,
    where there must be more, ends no text."""
    prompt, tokens = CUT[:at], CUT[at:] + tokens
    detokenizer = Detokenizer(tokenizer(), prompt)
    seen = list(enumerate(accumulate(map(detokenizer.push, tokens)), start=1))
    whole = "".join(text for _, text in seen[-1:]) + detokenizer.flush()
    # Some come, some are only begun, and some end where a longer one does.
    begin, size, rest = st.integers(0, len(whole)), st.integers(1, 4), st.sampled_from(["", "~"])
    part = st.builds(lambda at, size, rest: whole[at : at + size] + rest, begin, size, rest)
    drawn = data.draw(st.lists(part, max_size=3))
    stops = [stop for token in drawn for stop in (token[1:], token) if stop]
    least, include = data.draw(st.integers(0, len(tokens))), data.draw(st.booleans())
    early = len(dict(seen).get(least, ""))
    every = [text for text in (*seen, (len(tokens), whole)) if text[0] > least]

    def hits(text: str) -> list[tuple[int, str]]:
        found = [(text.find(stop, max(0, early + 1 - len(stop))), stop) for stop in stops]
        return [hit for hit in found if hit[0] >= 0]

    used, text = next((text for text in every if hits(text[1])), (len(tokens), whole))
    at, found = min(hits(text), default=(len(text), None)) if every else (len(text), None)
    at += len(found or "") * include
    rules = TextRules(stops, min_tokens=least, include_stop=include)
    stream = TextStream(tokenizer(), prompt, rules)
    given_out, taken, stop = "", 0, None
    while stop is None and taken < len(tokens):
        piece = stream.push(tokens[taken : taken + data.draw(st.integers(1, 5))])
        given_out, taken, stop = given_out + piece.text, taken + piece.tokens, piece.stop
    if stop is None:
        piece = stream.finish()
        given_out, stop = given_out + piece.text, piece.stop
    assert (given_out, taken, stop) == (text[:at], used, found)


def test_a_token_that_ends_the_answer_has_text_only_where_that_is_wanted() -> None:
    tokens = ids("the quick brown")
    for include, text in ((False, "the quick"), (True, "the quick brown")):
        rules = TextRules(stop_tokens=frozenset(tokens[-1:]), include_stop=include)
        stream = TextStream(tokenizer(), (), rules)
        assert stream.push(tokens).text + stream.finish().text == text


def test_special_tokens_have_text_only_where_that_is_wanted() -> None:
    tokens = [*ids("the"), EOS, *ids("fox")]
    for skip, text in ((True, "thefox"), (False, "the</s>fox")):
        stream = TextStream(tokenizer(), (), TextRules(skip_special=skip))
        assert stream.push(tokens).text + stream.finish().text == text
