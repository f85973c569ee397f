"""Where each token begins in the text of an answer, and what tokens and their log-probabilities are
called. Knows bytes of tokens, and no request."""

from __future__ import annotations

from typing import Any

from cluster.frontend.json_codec import json_array
from cluster.frontend.target_text import TargetText
from cluster.frontend.text import Detokenizer
from scheduler.decoding import TokenLogprobs


class TextOffsets:
    """Gives each token its place in a text: how many characters are before the character that the
    token begins, or goes on with. All tokens of one character have the same place.

    The places are in the text that the detokenizer makes of the same tokens.
    """

    def __init__(self, detokenizer: Detokenizer, before: bytes = b"") -> None:
        """`detokenizer`: it has seen what comes before the text; `before`: its last bytes."""
        self._detokenizer = detokenizer
        self._chars = 0
        """Of the text so far, without what the detokenizer holds back."""
        self._begun = _begun_in(before)
        """The bytes of a character that lacks some."""
        self._begun_at = 0
        """Its place."""

    @property
    def end(self) -> int:
        """How many characters the text has, with those that are not whole."""
        return self._chars + len(self._detokenizer.flush())

    def skip(self, name: str) -> int:
        """The place of a special token, which stands in the text by its name, or by none."""
        at = self.end
        self._chars += len(name)
        return at

    def place(self, token: int, said: bytes) -> int:
        """The place of the next token, which has these bytes."""
        goes_on = bool(self._begun and said) and _may_begin(self._begun + said[:1])
        at = self._begun_at if goes_on else self.end
        self._chars += len(self._detokenizer.push(token))
        whole = self._begun * goes_on + said
        self._begun = _begun_in(whole)
        if self._begun == whole:
            self._begun_at = at
        elif self._begun:
            # It begins behind another one, which is whole with this token.
            self._begun_at = max(at, self.end - 1)
        return at


def _begun_in(said: bytes) -> bytes:
    """Of these bytes the last ones that a character begins with which lacks some."""
    tails = (said[-size:] for size in range(min(3, len(said)), 0, -1))
    return next((tail for tail in tails if _lacks_some(tail)), b"")


def _may_begin(said: bytes) -> bool:
    """Whether a character is this, or begins with it."""
    try:
        return len(said.decode()) == 1
    except UnicodeDecodeError:
        return _lacks_some(said)


def _lacks_some(said: bytes) -> bool:
    """Whether a character begins with this, and has more."""
    try:
        said.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.end == len(said) and "unexpected end" in error.reason
    return False


class TokenNames:
    """Log-probabilities of one answer as they are told, with the names of their tokens."""

    def __init__(self, text: TargetText, as_ids: bool, tells_own: bool) -> None:
        """`as_ids`: names are ids. `tells_own`: a chat's list has the token that stands there."""
        self._text = text
        self._as_ids = as_ids
        self._tells_own = tells_own
        self._names: dict[int, str] = {}

    def top(self, told: tuple[int, TokenLogprobs | None]) -> dict[str, float] | None:
        """First the token that stands there, as in vLLM. Tokens that are part of a character may
        have one name: the likeliest has it."""
        token, said = told
        if said is None:
            return None
        top = {self.shown(token): said.logprob}
        for other, logprob in said.top:
            name = self.shown(other)
            top[name] = max(logprob, top.get(name, logprob))
        return top

    def of_chat(self, told: tuple[int, TokenLogprobs]) -> dict[str, Any]:
        token, said = told
        given = list(said.top)
        if self._tells_own and all(other != token for other, _ in given):
            given.append((token, said.logprob))
        top = json_array(given, lambda other: self.named(*other))
        return self.named(token, said.logprob) | {"top_logprobs": top}

    def named(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.shown(token),
            "logprob": logprob,
            "bytes": list(self._text.token_bytes(token)),
        }

    def ranked(self, told: tuple[int, TokenLogprobs | None]) -> dict[str, Any] | None:
        """The one that stands there, and the likeliest, by their ids."""
        token, said = told
        if said is None:
            return None
        ranks = {token: (said.rank, said.logprob)}
        for rank, (other, value) in enumerate(said.top, 1):
            ranks.setdefault(other, (rank, value))
        return {
            str(other): {"logprob": value, "rank": rank, "decoded_token": self.name(other)}
            for other, (rank, value) in ranks.items()
        }

    def shown(self, token: int) -> str:
        """As log-probabilities name it."""
        return f"token_id:{token}" if self._as_ids else self.name(token)

    def name(self, token: int) -> str:
        if (name := self._names.get(token)) is None:
            name = self._text.token_bytes(token).decode(errors="replace")
            self._names[token] = name
        return name
