"""How likely the target accepts the next draft token of a sequence, from what it accepted lately.

A step's first draft token and those behind an accepted one are two chances: suffix decoding often
finds nothing to go on from, but where it does, it is right many times in a row.

Per sequence a decayed count of draft tokens tried and accepted; where that is little, what all
sequences of the same class show lately stands in. A token counts if all before it were accepted,
also if it was asked for and the drafter had none: the estimate is the chance that asking for one
more token gains one.

Where a row's first draft token is accepted with chance a and each later one with b, k draft tokens
commit 1 + a + a b + ... + a b^(k - 1) tokens of it. Every k from 0 to the most has its own goodput,
because times rise in steps and so goodput has several peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Rows
from dataclasses import dataclass
from operator import mul

from scheduler.state import Answer, Sequence

DECAY = 0.85
"""What a sequence's past keeps of its weight per step."""
PRIOR_TRIES = 2.0
"""Tries for which the class's acceptance stands."""
CLASS_TRIES = 400.0
"""Tries after which a class has forgotten: a few hundred steps of a full batch."""
FIRST_GUESS = 0.6
"""Acceptance of a class of which nothing is known; a guess that lasts for a few tries."""
_GUESS_TRIES = 4.0


@dataclass(slots=True)
class _Chance:
    tried: float = _GUESS_TRIES
    agreed: float = _GUESS_TRIES * FIRST_GUESS

    @property
    def acceptance(self) -> float:
        return self.agreed / self.tried

    def observe(self, tried: int, agreed: int) -> None:
        fade = min(CLASS_TRIES / (self.tried + tried), 1.0)
        self.tried = fade * (self.tried + tried)
        self.agreed = fade * (self.agreed + agreed)


class Acceptance:
    """Estimates for the sequences of one pool: greedy and sampled ones are two classes."""

    def __init__(self) -> None:
        # Of a step's first draft token, and of later ones.
        self._greedy = (_Chance(), _Chance())
        self._sampled = (_Chance(), _Chance())

    def expect(self, acceptance: float) -> None:
        """A drafter was right so often in a trial; it stands for classes of which nothing is known
        yet."""
        for known in (*self._greedy, *self._sampled):
            if known.tried == _GUESS_TRIES:
                known.agreed = _GUESS_TRIES * acceptance

    def of(self, sequences: Iterable[Sequence]) -> tuple[list[float], list[float]]:
        """Probabilities in [0, 1] by sequence: that a step's first draft token is accepted, and
        that one more is behind an accepted one."""
        pairs = [(one, self._class_of(one)) for one in sequences]
        first, later = (
            [
                (one.agreed[at] + PRIOR_TRIES * known[at].acceptance)
                / (one.tried[at] + PRIOR_TRIES)
                for one, known in pairs
            ]
            for at in (0, 1)
        )
        return first, later

    def overall(self, greedy: bool) -> float:
        """The acceptance of a class lately."""
        first, later = self._greedy if greedy else self._sampled
        return (first.agreed + later.agreed) / (first.tried + later.tried)

    def observe(self, answers: Iterable[Answer]) -> None:
        """Rows came back from a batch. Where one drafted nothing its past fades all the same, so
        that a row which was given up comes back to what its class shows."""
        for sequence, row in answers:
            keep = DECAY**row.steps
            known = self._class_of(sequence)
            for at, part in enumerate((slice(1), slice(1, None))):
                tried, agreed = sum(row.tried_at[part]), sum(row.accepted_at[part])
                sequence.tried[at] = keep * sequence.tried[at] + tried
                sequence.agreed[at] = keep * sequence.agreed[at] + agreed
                if tried:
                    known[at].observe(tried, agreed)

    def _class_of(self, sequence: Sequence) -> tuple[_Chance, _Chance]:
        return self._sampled if sequence.request.sampling.temperature else self._greedy


def likelihoods(
    first: Rows[float], later: Rows[float], limits: Rows[int], most: int
) -> list[list[float]]:
    """Of each draft position up to `most`: how likely it is accepted in each row.

    `first` and `later` (acceptances) and `limits` (most draft tokens) are those of each row.
    """
    least = min(limits, default=most)
    likely: list[float] = list(first)
    found = []
    for position in range(most):
        if position >= least:
            likely = [
                one if position < limit else 0.0 for one, limit in zip(likely, limits, strict=True)
            ]
        found.append(likely)
        likely = list(map(mul, likely, later))
    return found


def goodputs(likely: Rows[list[float]], rows: int, seconds: Rows[float]) -> list[float]:
    """Tokens per second by draft length; `seconds` are those of a step of so many rows."""
    tokens = float(rows)
    found = [tokens / seconds[0]]
    for position, spent_s in zip(likely, seconds[1:], strict=True):
        tokens += sum(position)
        found.append(tokens / spent_s)
    return found
