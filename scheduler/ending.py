"""Who may not be left out of a group lest the last groups be thin.

While nobody waits, the rows that step are the last ones known. With more than one group of them
and fewer than two, some are left out of every group, and those who are left out often go on alone
when the others have ended. A row is late if it has as many tokens left as a place in the groups has
that all would need together: it has to be in each of them for all to end at the same time (a job
without laxity, in terms of real-time scheduling). How many tokens a step commits of a row is taken
to be the same for all; their own acceptances made no difference.

In virtual time, 64 prompts at once and the demo pair's times, that is worth 1 % of throughput with
groups of 16 and half of it with 8. One long request among short ones ends a fifth sooner.

Knows rows and their limits; nothing of lengths, waits and groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows

from scheduler.sequence import Sequence

LATE_SHARE = 4
"""At most one in so many places of a group goes to late rows: a limit is not always reached, and
the others have their readers, too."""


def with_late(
    chosen: Rows[Sequence], ready: Iterable[Sequence], tokens_left: int
) -> list[Sequence]:
    """The chosen rows of a group, with late ready ones in place of those that have least left;
    `tokens_left` are those of all rows that step. In no particular batch."""
    size = len(chosen)
    late = [one for one in ready if size * one.tokens_left >= tokens_left]
    if not late:
        return list(chosen)
    late.sort(key=lambda one: (-one.tokens_left, one.number))
    late = late[: size // LATE_SHARE]
    inside = set(chosen)
    missing = [one for one in late if one not in inside]
    # A first token waits for nothing.
    others = [one for one in chosen if one.committed and one not in late]
    others.sort(key=lambda one: (one.tokens_left, one.number))
    leave = set(others[: len(missing)])
    return [*(one for one in chosen if one not in leave), *missing[: len(leave)]]
