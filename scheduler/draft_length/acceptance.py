"""How likely the target accepts the next draft token of a sequence, from what it accepted lately.

Per sequence a decayed count of draft tokens tried and accepted; where that is little, what all
sequences of the same class show lately stands in. A token counts if all before it were accepted,
also if it was asked for and the drafter had none: the estimate is the chance that asking for one
more token gains one.

With the acceptance rate a of a row, k draft tokens commit 1 + a + ... + a^k tokens of it. Every k
from 0 to the most has its own goodput, because times rise in steps and so goodput has several
peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Rows
from dataclasses import dataclass
from operator import mul

from scheduler.state import Answer, Sequence

DECAY = 0.85
"""What a sequence's past keeps of its weight per step."""
PRIOR_TRIES = 3.0
"""Tries for which the class's acceptance rate stands."""
CLASS_TRIES = 400.0
"""Tries after which a class has forgotten: a few hundred steps of a full batch."""
FIRST_GUESS = 0.6
"""Acceptance rate of a class of which nothing is known; a guess that lasts for a few tries."""
_GUESS_TRIES = 4.0


@dataclass(slots=True)
class _SequenceClass:
    tried: float = _GUESS_TRIES
    agreed: float = _GUESS_TRIES * FIRST_GUESS

    @property
    def acceptance(self) -> float:
        return self.agreed / self.tried


class AcceptanceRates:
    """Estimates for the sequences of one pool: greedy and sampled ones are two classes."""

    def __init__(self) -> None:
        self._classes = {greedy: _SequenceClass() for greedy in (True, False)}

    def expect(self, acceptance: float) -> None:
        """A drafter had this acceptance rate, in [0, 1], in a trial: it stands for classes that are
        not known yet."""
        for known in self._classes.values():
            if known.tried == _GUESS_TRIES:
                known.agreed = _GUESS_TRIES * acceptance

    def of(self, sequences: Iterable[Sequence]) -> list[float]:
        """Probabilities in [0, 1] that one more draft token of each sequence is accepted."""
        return [
            (row.agreed + PRIOR_TRIES * self._class_of(row).acceptance) / (row.tried + PRIOR_TRIES)
            for row in sequences
        ]

    def overall(self, greedy: bool) -> float:
        """The acceptance rate of a class lately."""
        return self._classes[greedy].acceptance

    def observe(self, answers: Iterable[Answer]) -> None:
        """Rows came back from a batch. Where one drafted nothing its past fades all the same, so
        that a row which was given up comes back to what its class shows."""
        for sequence, row in answers:
            tried, agreed = sum(row.tried_at), sum(row.accepted_at)
            keep = DECAY**row.steps
            sequence.tried = keep * sequence.tried + tried
            sequence.agreed = keep * sequence.agreed + agreed
            if tried:
                known = self._class_of(sequence)
                fade = min(CLASS_TRIES / (known.tried + tried), 1.0)
                known.tried = fade * (known.tried + tried)
                known.agreed = fade * (known.agreed + agreed)

    def _class_of(self, sequence: Sequence) -> _SequenceClass:
        return self._classes[sequence.request.sampling.temperature == 0]


def likelihoods(acceptances: Rows[float], limits: Rows[int], most: int) -> list[list[float]]:
    """Of each draft position up to `most`: how likely it is accepted in each row.

    `acceptances` and `limits` (most draft tokens) are those of each row.
    """
    least = min(limits, default=most)
    likely: list[float] = list(acceptances)
    found = []
    for position in range(most):
        if position >= least:
            chances = zip(likely, limits, strict=True)
            likely = [chance if position < limit else 0.0 for chance, limit in chances]
        found.append(likely)
        likely = list(map(mul, likely, acceptances))
    return found


def goodputs(likely: Rows[list[float]], rows: int, seconds: Rows[float]) -> list[float]:
    """Tokens per second by draft length; `seconds` are those of a step of so many rows."""
    tokens = float(rows)
    found = [tokens / seconds[0]]
    for position, spent_s in zip(likely, seconds[1:], strict=True):
        tokens += sum(position)
        found.append(tokens / spent_s)
    return found
