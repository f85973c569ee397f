"""Where a row is in its grammar, and how drafts are followed without moving it.

llguidance bounds what a grammar may cost: items of its parser, states and work of its lexer. A
lexer is built while it is used, and copies of a matcher share it, so what a copy explores counts
against all others. Therefore a row has a matcher that nothing else touches and that always does the
same for the same tokens: a mask, a token, the next mask. Where that one stops the row stops,
whatever was drafted and whatever runs beside it. Draft tokens are followed on copies of another
matcher, which the rows of one grammar share; where it stops the draft is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import thread_time
from typing import Any

import numpy as np
from llguidance import LLMatcher

MASK_S_MAX = 0.1
"""CPU time that the mask of one place may take."""
_QUICK_S = 0.005
"""CPU time of a mask from which on a row's grammar is slow: it takes no drafts then."""
_WALK_S_MAX = 0.02
"""CPU time after which a draft is cut."""

Mask = np.ndarray[Any, np.dtype[np.uint8]]  # [vocab / 8]
"""A bit for each token that is allowed, the lowest bit first."""


class GrammarError(ValueError):
    """A grammar that cannot be used, or cannot go on; the text says why."""


@dataclass(frozen=True, eq=False)
class Follower:
    """A grammar's matcher at the beginning of a text; copies of it follow drafts."""

    matcher: LLMatcher


@dataclass(frozen=True, slots=True)
class Walk:
    """A draft that the grammar allows, and what it allows along it."""

    draft: list[int]
    masks: list[Mask]
    """In place j after the first j draft tokens. Behind a token that ends the text there is none:
    the row never gets there."""


class GrammarState:
    """Where one row is in its grammar. After a token that ends the text it stays where it is.

    One thread at a time may use it.
    """

    def __init__(self, matcher: LLMatcher, follower: Follower | None, ends: frozenset[int]) -> None:
        """At the beginning of a text. Without a follower it takes no drafts."""
        self._matcher = matcher
        """The row's own: it sees the row's own tokens alone, and makes a mask before each."""
        self._mask: Mask | None = None
        """Of the place that the row has reached; None: not made yet."""
        self._ends = ends
        self._follower = follower
        self._behind = None if follower is None else follower.matcher.deep_copy()
        """A copy of the follower's that has yet to see `_unseen`."""
        self._unseen: list[int] = []
        self.slow = False
        """Whether a mask took so long that others should not wait for those of this row."""

    def mask(self) -> Mask:
        """What may come next. Raises GrammarError."""
        if self._mask is None:
            begun_s = thread_time()
            self._mask = _mask_of(self._matcher)
            spent_s = thread_time() - begun_s
            self.slow |= spent_s > _QUICK_S
            if spent_s > MASK_S_MAX:
                raise GrammarError(f"it takes over {MASK_S_MAX:g} s to find what may come next")
        return self._mask

    def walk(self, draft: Sequence[int], most: int) -> Walk:
        """The draft as far as it is allowed, then what must follow; `most` tokens at most. Changes
        nothing that `mask` and `advance` depend on. Raises GrammarError."""
        masks = [self.mask()]
        kept: list[int] = []
        proposed = list(draft)
        trial: LLMatcher | None = None
        begun_s = thread_time()
        while len(kept) < most and self._behind is not None and not self.slow:
            at = len(kept)
            if at < len(proposed) and _allows(masks[at], proposed[at]):
                token = proposed[at]
            else:
                del proposed[at:]
                forced = _only(masks[at])
                if forced is None:
                    break
                token = forced
            if token in self._ends:
                kept.append(token)
                break
            try:
                trial = trial or self._copy()
                _consume(trial, token)
                masks.append(_mask_of(trial))
            except GrammarError:
                break  # whether the row stops there, its own matcher says
            kept.append(token)
            if thread_time() - begun_s > _WALK_S_MAX:
                break
        return Walk(kept, masks)

    def advance(self, tokens: Sequence[int]) -> tuple[int, GrammarError | None]:
        """The row has chosen these, each by the mask of its place. Returns how many of them stand,
        and why the row stops behind them if it does."""
        for index, token in enumerate(tokens):
            if token in self._ends:
                break
            try:
                self.mask()
            except GrammarError as error:
                return index, error
            self._mask = None
            if self._behind is not None:
                self._unseen.append(token)
            try:
                _consume(self._matcher, token)
            except GrammarError as error:
                return index + 1, error
        return len(tokens), None

    def _copy(self) -> LLMatcher:
        """A copy of the follower's matcher that stands where the row does. Raises GrammarError."""
        assert self._behind is not None
        for token in self._unseen:
            _consume(self._behind, token)
        self._unseen.clear()
        return self._behind.deep_copy()


def _mask_of(matcher: LLMatcher) -> Mask:
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    _check(matcher)
    return mask


def _consume(matcher: LLMatcher, token: int) -> None:
    matcher.consume_token(token)
    _check(matcher)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        said = matcher.get_error()
        # Of its own words only what is known to quote no text.
        reasons = (reason for sign, reason in _STOPPED.items() if sign in said)
        raise GrammarError(next(reasons, "it cannot go on"))


_STOPPED = {
    "NoExtension": "it allows no further token",
    "items": "it is too ambiguous: too many ways to read the text",
    "states": "its expressions are too complex",
    "expressions": "its expressions are too complex",
}
"""By a word of llguidance's, why a matcher stopped."""


def _allows(mask: Mask, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _only(mask: Mask) -> int | None:
    """The one token that the mask allows; None if there are more."""
    (places,) = mask.nonzero()
    if len(places) != 1:
        return None
    byte = int(mask[places[0]])
    return None if byte & (byte - 1) else int(places[0]) * 8 + byte.bit_length() - 1
