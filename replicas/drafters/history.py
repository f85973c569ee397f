"""Tokens in order, and for every pair of neighbours where it stood before.

As in LZ77 compressors a table finds the last place of a pair, and each place names the one before.
Truncation undoes insertions one by one. It finds what a suffix tree finds as long as the matches
are among the last few of a pair.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import itemgetter

PLACES = 16
"""Places of a pair that are looked at, the latest first."""
DEPTH = 32
"""Tokens that a match is measured by."""
DEEP = 4
"""Matches of DEPTH tokens after which no further place is looked at."""
LEAST_PROBABILITY = 0.1
"""A draft ends before a token that is less likely with all before it."""
END = -1
"""Stands between texts; no draft goes beyond it."""
TOKEN_BYTES = 168
"""Of a history, at most: the table has an entry for each pair, and more while it grows."""

Draft = tuple[float, list[int]]
"""The sum of its tokens' probabilities, and the tokens."""


class History:
    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self._before = array("i")
        """For each token: the last place before at which its pair ended, or -1."""
        self._last: dict[int, int] = {}
        """By pair: the last place of all."""
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        own, before, last = self.tokens, self._before, self._last
        first = own[-1] if own else END
        for place, second in enumerate(tokens, len(own)):
            pair = _pair(first, second)
            before.append(last.get(pair, -1))
            last[pair] = place
            own.append(second)
            first = second

    def truncate(self, length: int) -> None:
        """Forget all tokens from there on."""
        while len(self.tokens) > length:
            second = self.tokens.pop()
            pair = _pair(self.tokens[-1] if self.tokens else END, second)
            self._last[pair] = self._before.pop()

    def draft(self, most: int, tail: Sequence[int] | None = None) -> Draft:
        """The best draft of at most so many tokens for a text that ends with `tail`; None: for its
        own. After a match of m tokens it has at most m + 1.

        For each match length the places that match so far vote for the next token; a token's
        probability is its share of the votes times that of the token before.
        """
        if tail is None:
            if len(self.tokens) < 2:
                return 0.0, []
            tail, place = self.tokens[-DEPTH:], self._before[-1]
            end = len(self.tokens)
        else:
            place, end = self._last.get(_pair(tail[-2], tail[-1]), -1), 0
        found = self._matches(tail, place)
        score, best = 0.0, []
        for index, (length, _) in enumerate(found):
            if index + 1 < len(found) and found[index + 1][0] == length:
                continue
            limit = min(most, length + 1)
            if limit <= score:
                break  # shorter matches give shorter drafts, and no token counts more than 1
            sum_, tokens = self._follow([place for _, place in found[: index + 1]], limit, end)
            if sum_ > score:
                score, best = sum_, tokens
        return score, best

    def _matches(self, tail: Sequence[int], place: int) -> list[tuple[int, int]]:
        """(tokens that match the tail, where the match ends), the longest first, then the latest;
        of at least two tokens."""
        own = self.tokens
        whole, reach = array("i", tail), len(tail)
        found: list[tuple[int, int]] = []
        deep = 0
        while place > 0 and deep < DEEP and len(found) < PLACES:
            if own[max(place + 1 - reach, 0) : place + 1] == whole:
                length = reach
                deep += 1
            else:
                length, limit = 2, min(place + 1, reach)
                while length < limit and own[place - length] == tail[-1 - length]:
                    length += 1
            found.append((length, place))
            place = self._before[place]
        found.sort(key=itemgetter(0), reverse=True)
        return found

    def _follow(self, places: list[int], limit: int, end: int) -> Draft:
        """What most of these places are followed by, token by token. A text that is drafted for,
        with its `end` here, goes on with its own draft."""
        own, size = self.tokens, len(self.tokens)
        draft: list[int] = []
        probability, score = 1.0, 0.0
        for ahead in range(1, limit + 1):
            votes: dict[int, list[int]] = {}
            for place in places:
                at = place + ahead
                if at < size:
                    token = own[at]
                elif end:
                    token = draft[at - end]
                else:
                    token = END
                votes.setdefault(token, []).append(place)
            token, kept = max(votes.items(), key=lambda vote: len(vote[1]))
            probability *= len(kept) / len(places)
            if token == END or probability < LEAST_PROBABILITY:
                break
            places = kept
            draft.append(token)
            score += probability
        return score, draft


def _pair(first: int, second: int) -> int:
    return (first << 32) + second
