"""Grammars beside the step: what a row needs of its grammar is made on other threads.

llguidance works without the interpreter's lock, so rows are worked on at once. A row whose grammar
is not compiled, or whose masks are not there, takes no part in a step, and its work goes on: a step
waits for the masks of quick grammars for STEP_S_MAX, and where it has other rows, for nothing else.
So a costly grammar holds up its own row alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

from replicas.grammars.grammar import Grammars
from replicas.grammars.state import GrammarError, GrammarState, Walk

STEP_S_MAX = 0.05
"""How long a step waits for masks."""
PATIENT_S = 60.0
"""How long it waits where every row must take part."""
_COMPILERS = 4
_NICE = 5
"""Work that no step waits for yields to the others'."""

Advanced = tuple[int, GrammarError | None]
"""How many tokens stand, and why the row stops behind them if it does."""


class RowGrammar:
    """The grammar of one row; its methods start work and return at once."""

    def __init__(
        self, grammars: Grammars, grammar: str, tokens: Sequence[int], drafts: bool
    ) -> None:
        """After these new tokens. `drafts`: there is a drafter."""
        self._state: Future[GrammarState] = _compilers().submit(
            grammars.match, grammar, tokens, drafts
        )
        self._walk: Future[Walk] | None = None

    @property
    def compiling(self) -> Future[GrammarState] | None:
        return None if self._state.done() else self._state

    @property
    def slow(self) -> bool:
        """Of one that is compiled: whether its masks take long."""
        return self._state.exception() is None and self._state.result().slow

    def walk(self, draft: Sequence[int], most: int) -> Future[Walk]:
        """See `GrammarState.walk`; it is made once for each place that the row reaches. The grammar
        is compiled."""
        if self._walk is None:
            try:
                state = self._state.result(timeout=0)
            except GrammarError as error:
                self._walk = Future()
                self._walk.set_exception(error)
            else:
                self._walk = _walkers(state.slow).submit(state.walk, draft, most)
        return self._walk

    def advance(self, tokens: Sequence[int]) -> Future[Advanced]:
        """See `GrammarState.advance`; the row has walked from here."""
        self._walk = None
        state = self._state.result(timeout=0)
        return _walkers(state.slow).submit(state.advance, tokens)


def walks(
    rows: Mapping[int, RowGrammar],
    drafts: Sequence[Sequence[int]],
    most: Sequence[int],
    alone: bool,
    patient: bool,
) -> dict[int, Walk | GrammarError | None]:
    """The walks of these rows of a batch, or why they stop; None of those that take no part in the
    step. `drafts` and `most` (draft tokens) are those of all rows of the batch.

    `alone`: the batch has no other rows. `patient`: all rows must take part.
    """
    bound_s = PATIENT_S if patient else STEP_S_MAX
    compiling = [work for row in rows.values() if (work := row.compiling) is not None]
    if compiling and patient:
        wait(compiling, bound_s)
    walking = {
        index: row.walk(drafts[index], most[index])
        for index, row in rows.items()
        if row.compiling is None
    }
    quick = [work for index, work in walking.items() if patient or not rows[index].slow]
    wait(quick, bound_s)
    if alone and not quick:  # the step has nothing else to do
        others: list[Future[Any]] = [*compiling, *walking.values()]
        wait(others, bound_s, FIRST_COMPLETED)
    found = {index: _result(walking.get(index)) for index in rows}
    assert not patient or None not in found.values(), f"no masks within {bound_s:g} s"
    return found


def _result(walking: Future[Walk] | None) -> Walk | GrammarError | None:
    if walking is None or not walking.done():
        return None
    error = walking.exception()
    if isinstance(error, GrammarError):
        return error
    return walking.result()


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COMPILERS, "grammar-compiler", _yield_to_others)


@cache
def _walkers(slow: bool) -> ThreadPoolExecutor:
    """Slow grammars wait for one another, not quick ones for them."""
    count = min(len(os.sched_getaffinity(0)), 8)
    if slow:
        return ThreadPoolExecutor(count, "slow-grammar", _yield_to_others)
    return ThreadPoolExecutor(count, "grammar")


def _yield_to_others() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
