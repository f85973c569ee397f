"""From tokens to text: incremental detokenization and stop strings. Pure; knows no request.

Everything here is a function of the tokens alone, never of how they were cut into chunks: the same
tokens pushed one by one, in one go, or on another frontend give the same text at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from tokenizers import Tokenizer

_CONTEXT_TOKENS = 16
"""Tokens of the prompt that the decoder sees, so that the first new token gets its space right."""
CHARACTER_BYTES = 4
"""In UTF-8, at most."""
_INCOMPLETE = "\ufffd"
"""What a decoder makes of bytes that are no character, or not yet."""
HELD_MAX = 64
"""So many tokens are held back at most, for all of them are decoded again with each one more."""
_KEPT = 8
"""So many stay when their text must go: more bytes than a character has, so that a decoder which
begins with them ends in step."""


class Detokenizer:
    """Turns tokens into whole characters; holds a character back until its last byte is there.

    The text of valid UTF-8 is that of all tokens decoded at once, and so is that of bad bytes in a
    byte-level tokenizer. One with byte fallback makes a whole run of byte tokens U+FFFD, one for
    each, if any of them is bad. Here what was given out before the bad one stays; after every
    `HELD_MAX` tokens the run is text again if its last `_KEPT` are text by themselves. What a push
    costs is bounded, whatever the tokens are.

    A prompt may end within a character. The text of the answer then begins with that character as
    soon as it is whole. If it never is, its U+FFFD belongs to the prompt, and is not repeated.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], shown: Set[int] = frozenset()
    ) -> None:
        """`shown`: special tokens whose names belong to the text."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._special = special_ids(tokenizer)
        self._settled: list[int]
        """Tokens before those held back: the last ones whose text was given out, or the prompt."""
        self._held: list[int]
        """Tokens whose text was not given out."""
        self._given: str
        """What of the text of both was given out, or is the prompt's."""
        self._of_prompt = ""
        """What the prompt's text already has of the tokens held back."""
        self._ends_prompt = True
        """Whether those were the prompt's last ones."""
        self._begin(prompt)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        text = self._push(token)
        if not text or not self._of_prompt:
            return text
        rest = self._unsaid(text)
        self._of_prompt = "" if rest else self._of_prompt[len(text) :]
        return rest

    def take_from_prompt(self) -> int:
        """Give out also what the prompt's text has of a character that may not be whole. Returns of
        how many tokens at the prompt's end the text comes here now. To be called before a push."""
        if not self._ends_prompt:
            return 0
        self._of_prompt = ""
        return len(self._held)

    def flush(self) -> str:
        """What is held back, as it is when no token comes any more: bytes of no character, as
        U+FFFD. Changes nothing."""
        return self._unsaid(self._rest(self._decode(self._settled + self._held)))

    def _begin(self, prompt: Sequence[int]) -> None:
        context = list(prompt[-_CONTEXT_TOKENS:])
        if _INCOMPLETE not in self._decode(context):
            self._settle(context)
            return
        # It may begin within a character, which makes a whole run of byte tokens U+FFFD.
        begins = range(CHARACTER_BYTES if len(prompt) > _CONTEXT_TOKENS else 1)
        tails = [context[at:] for at in begins]
        self._pass_over(min(tails, key=lambda tail: self._pass_over(tail).count(_INCOMPLETE)))
        self._of_prompt = self.flush()
        self._ends_prompt = context[len(context) - len(self._held) :] == self._held

    def _pass_over(self, tokens: list[int]) -> str:
        """Begin anew with these tokens. Returns their text, with what is held back."""
        self._settle([])
        return "".join(map(self._push, tokens)) + self.flush()

    def _push(self, token: int) -> str:
        if token in self._shown:
            text = self.flush()
            self._settle((self._settled + self._held)[-_CONTEXT_TOKENS:])
            return text + (self._tokenizer.id_to_token(token) or "")
        if token in self._special or self._tokenizer.id_to_token(token) is None:
            # The decoder never sees it, wherever it stands.
            return ""
        self._held.append(token)
        text = self._decode(self._settled + self._held)
        if text.endswith(_INCOMPLETE) or self._given.startswith(text):
            return self._let_go(text) if len(self._held) == HELD_MAX else ""
        rest = self._rest(text)
        self._settle(self._held)
        return rest

    def _unsaid(self, text: str) -> str:
        """Without what the prompt's text has of it."""
        pairs = zip(self._of_prompt, text, strict=False)
        return text[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]

    def _rest(self, text: str) -> str:
        """Of the text of all tokens that are here what was not given out."""
        if text.startswith(self._given):
            return text[len(self._given) :]
        # With the tokens held back those before them decode to other text (one bad byte spoils a
        # whole run of byte tokens). What was given out stays, and the others are decoded alone.
        return self._decode(self._held)

    def _let_go(self, text: str) -> str:
        """Give out the text of the tokens held back, but for what may yet become a character."""
        rest = self._rest(text)
        kept = self._held[-_KEPT:]
        if not rest:
            self._held = kept
            return ""
        # The kept tokens may begin within a character, and their text with U+FFFD that the whole
        # text has not. Both end alike: what may yet become a character is the last one of both.
        again = self._decode(kept)
        opened = int(rest.endswith(_INCOMPLETE) and again.endswith(_INCOMPLETE))
        self._settled, self._held = kept[: _KEPT - opened], kept[_KEPT - opened :]
        self._given = again[: len(again) - opened]
        return rest[: len(rest) - opened]

    def _settle(self, tokens: list[int]) -> None:
        self._settled, self._held, self._given = tokens, [], self._decode(tokens)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


@lru_cache(maxsize=16)
def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that have no text in an answer."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, of in added.items() if of.special)


@lru_cache(maxsize=16)
def shown_ids(tokenizer: Tokenizer, markers: tuple[str, ...]) -> frozenset[int]:
    """Special tokens whose names are in one of these markers."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(
        token for token in special_ids(tokenizer) if any(added[token].content in m for m in markers)
    )


def tail_of(text: str, words: Sequence[str]) -> int:
    """Characters at the text's end that may be the beginning of one of these words, of which it has
    none."""
    longest = min(len(text), max(map(len, words)) - 1)
    for size in range(longest, 0, -1):
        suffix = text[len(text) - size :]
        if any(word.startswith(suffix) for word in words):
            return size
    return 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to give out, how many of the pushed tokens belong to the answer, and why it ends."""

    text: str
    tokens: int
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class TextRules:
    """What of an answer's tokens is its text."""

    stops: Sequence[str] = ()
    """Strings before the first of which it ends."""
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer; they have no text."""
    min_tokens: int = 0
    """A stop string ends the text only behind so many tokens."""
    include_stop: bool = False
    """What ends the answer belongs to its text."""
    shown: Set[int] = frozenset()
    """Special tokens whose names belong to the text."""
    skip_special: bool = True
    """All others have no text."""


class TextStream:
    """The text of one answer, up to the first stop string in it, which may span several pushes."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], rules: TextRules) -> None:
        shown = rules.shown if rules.skip_special else special_ids(tokenizer)
        self._detokenizer = Detokenizer(tokenizer, prompt, shown)
        self._rules = rules
        self._stops = tuple(rules.stops)
        self._silent = frozenset[int]() if rules.include_stop else rules.stop_tokens
        self._tokens = 0
        """Pushed so far."""
        self._held = ""
        """Text that may be the beginning of a stop string."""

    def take_from_prompt(self) -> int:
        """As of a `Detokenizer`, for a text that repeats its prompt."""
        return self._detokenizer.take_from_prompt()

    def push(self, tokens: Sequence[int]) -> Piece:
        """Feed tokens; after a stop string was found the rest of them is left alone."""
        texts: list[str] = []
        for used, token in enumerate(tokens, start=1):
            self._tokens += 1
            silent = token in self._silent
            text, stop = self._free("" if silent else self._detokenizer.push(token))
            texts.append(text)
            if stop is not None:
                return Piece("".join(texts), used, stop)
        return Piece("".join(texts), len(tokens))

    def finish(self) -> Piece:
        """No more tokens: give out all that is held back."""
        text, stop = self._free(self._detokenizer.flush())
        return Piece(text if stop is not None else text + self._held, 0, stop)

    def _free(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to give out, and the stop string if one is complete."""
        if not self._stops:
            return text, None
        passed = len(self._held)
        text = self._held + text
        if self._tokens > self._rules.min_tokens:
            # What is held was looked at, or came too early: a stop string ends behind it.
            found = [
                (at, stop)
                for stop in self._stops
                if (at := text.find(stop, max(0, passed + 1 - len(stop)))) >= 0
            ]
            if found:
                at, stop = min(found)
                return text[: at + len(stop) * self._rules.include_stop], stop
        kept = tail_of(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], None
