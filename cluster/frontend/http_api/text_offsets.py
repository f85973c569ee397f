"""Where each token begins in the text of an answer. Knows bytes of tokens, and no request."""

from __future__ import annotations

from cluster.frontend.text import Detokenizer


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
