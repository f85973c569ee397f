"""Tokens in order, and for every pair of neighbours where it stood before.

That is the hash chain of LZ77 compressors: a table finds the last place of a pair, each place names
the one before. It costs 12 bytes and one insertion per token, and truncation undoes insertions one
by one. It finds what a suffix tree finds as long as the matches are among the last few of a pair.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import itemgetter

PLACES = 16
"""Places of a pair that are looked at, the latest first."""
_HOPS = 48
"""Places of a chain that are visited; pairs of one hash share a chain. With all of them, and all
PLACES, questions of Spec-Bench get as many tokens a step: 1.73 where copying is asked for, else
1.44."""
DEPTH = 32
"""Tokens that a match is measured by."""
DEEP = 4
"""Matches of DEPTH tokens after which no further place is looked at."""
LEAST_PROBABILITY = 0.1
"""A draft ends before a token that is less likely with all before it."""
END = -1
"""Stands between texts; no draft goes beyond it."""
_MIX = 0x9E3779B1
_HEADS_LEAST = 256
_LOAD = 2
"""Tokens per place of the table."""
TOKEN_BYTES = 16
"""Of a history of some length at most; the table has four times as many places at once."""

Draft = tuple[float, list[int]]
"""The sum of its tokens' probabilities, and the tokens."""


class History:
    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self._before = array("i")
        """For each token: the last place before at which a pair of this hash ended, or -1."""
        self._heads = array("i", [-1]) * _HEADS_LEAST
        """By hash: the last place of all."""
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def bytes(self) -> int:
        arrays = (self.tokens, self._before, self._heads)
        return sum(one.itemsize * len(one) for one in arrays)

    def extend(self, tokens: Iterable[int]) -> None:
        own = self.tokens
        begin = len(own)
        own.extend(tokens)
        if len(own) > _LOAD * len(self._heads):
            size = len(self._heads)
            while len(own) > _LOAD * size:
                size *= 4
            self._heads = array("i", [-1]) * size
            del self._before[:]
            begin = 0
        heads, before, mask = self._heads, self._before, len(self._heads) - 1
        first = own[begin - 1] if begin else END
        for place in range(begin, len(own)):
            second = own[place]
            at = ((first * _MIX) ^ second) & mask
            before.append(heads[at])
            heads[at] = place
            first = second

    def truncate(self, length: int) -> None:
        """Forget all tokens from there on."""
        own, before, heads = self.tokens, self._before, self._heads
        mask = len(heads) - 1
        while len(own) > length:
            second = own.pop()
            heads[((own[-1] if own else END) * _MIX ^ second) & mask] = before.pop()

    def draft(self, most: int, offset: int, tail: Sequence[int] | None = None) -> Draft:
        """The best draft of at most so many tokens for a text that ends with `tail`; None: for its
        own. After a match of m tokens it has at most m + offset.

        For each match length the places that match so far vote for the next token; a token's
        probability is its share of the votes times that of the token before.
        """
        if tail is None:
            if len(self.tokens) < 2:
                return 0.0, []
            tail, place = self.tokens[-DEPTH:], self._before[-1]
            end = len(self.tokens)
        else:
            hashed = (tail[-2] * _MIX) ^ tail[-1]
            place, end = self._heads[hashed & (len(self._heads) - 1)], 0
        found = self._matches(tail, place)
        score, best = 0.0, []
        for index, (length, _) in enumerate(found):
            if index + 1 < len(found) and found[index + 1][0] == length:
                continue
            limit = min(most, length + offset)
            if limit <= score:
                break  # shorter matches give shorter drafts, and no token counts more than 1
            sum_, tokens = self._follow([place for _, place in found[: index + 1]], limit, end)
            if sum_ > score:
                score, best = sum_, tokens
        return score, best

    def _matches(self, tail: Sequence[int], place: int) -> list[tuple[int, int]]:
        """(tokens that match the tail, where the match ends), the longest first, then the latest;
        of at least two tokens."""
        own, before = self.tokens, self._before
        whole, reach = array("i", tail), len(tail)
        last, second = tail[-1], tail[-2]
        found, deep = [], 0
        for _ in range(_HOPS):
            if place < 1:
                break
            if own[place] == last and own[place - 1] == second:
                if place + 1 >= reach and own[place + 1 - reach : place + 1] == whole:
                    length = reach
                    deep += 1
                else:
                    length, limit = 2, min(place + 1, reach)
                    while length < limit and own[place - length] == tail[-1 - length]:
                        length += 1
                found.append((length, place))
                if deep == DEEP or len(found) == PLACES:
                    break
            place = before[place]
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
