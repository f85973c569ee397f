"""From tokens to text: incremental detokenization and stop strings. Pure; knows no request.

Everything here is a function of the tokens alone, never of how they were cut into chunks: the same
tokens pushed one by one, in one go, or on another ingress give the same text at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT_TOKENS = 16
"""Tokens of the prompt that the decoder sees, so that the first new token gets its space right."""
_INCOMPLETE = "\ufffd"
"""What a decoder makes of bytes that are no character, or not yet."""


class Detokenizer:
    """Turns tokens into whole characters; holds a character back until its last byte is there."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._settled: list[int]
        """Tokens before those held back: the last ones whose text was given out, or the prompt."""
        self._held: list[int]
        """Tokens whose text was not given out."""
        context = list(prompt[-_CONTEXT_TOKENS:])
        # The stream takes no context that ends within a character: it would repeat it as output.
        self._begin([] if self._decode(context).endswith(_INCOMPLETE) else context)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:
            # Its only error: with this token the tokenizer decodes the tokens before it to other
            # text (one bad byte spoils a whole run of byte tokens). What was given out stays, and
            # the tokens held back speak for themselves.
            text = self._decode(self._held)
            self._begin(self._held)
            return text
        if text is None:
            return ""
        self._settled, self._held = self._held, []
        return str(text)

    def flush(self) -> str:
        """What is still held back: bytes that never became a character, as U+FFFD."""
        before = self._decode(self._settled)
        text = self._decode(self._settled + self._held)
        rest = text[len(before) :] if text.startswith(before) else self._decode(self._held)
        self._settled, self._held = self._settled + self._held, []
        return rest

    def _begin(self, context: list[int]) -> None:
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)
        self._settled, self._held = context, []

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


class StopStrings:
    """Ends a text before the first stop string in it, also when it spans several pushes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to give out, and the stop string if one is complete."""
        if not self._stops:
            return text, None
        text = self._held + text
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, stop = min(hits)
            self._held = ""
            return text[:at], stop
        keep = self._suffix_that_may_begin_a_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def _suffix_that_may_begin_a_stop(self, text: str) -> int:
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for size in range(longest, 0, -1):
            suffix = text[len(text) - size :]
            if any(stop.startswith(suffix) for stop in self._stops):
                return size
        return 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to give out, how many of the pushed tokens belong to the answer, and why it ends."""

    text: str
    tokens: int
    stop: str | None = None


class TextStream:
    """Detokenizer and stop strings of one answer."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops)

    def push(self, tokens: Sequence[int]) -> Piece:
        """Feed tokens; after a stop string was found the rest of them is left alone."""
        texts: list[str] = []
        for used, token in enumerate(tokens, start=1):
            text, stop = self._stops.push(self._detokenizer.push(token))
            texts.append(text)
            if stop is not None:
                return Piece("".join(texts), used, stop)
        return Piece("".join(texts), len(tokens))

    def finish(self) -> Piece:
        """No more tokens: give out all that is held back."""
        text, stop = self._stops.push(self._detokenizer.flush())
        if stop is None:
            text += self._stops.flush()
        return Piece(text, 0, stop)
