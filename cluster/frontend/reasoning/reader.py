"""Parts the text of an answer, as it comes, into reasoning and the rest. Pure.

What was given out is a function of the text so far, never of how it was cut. White space around
reasoning is dropped, and so is markup.
"""

from __future__ import annotations

from enum import Enum, auto

from cluster.frontend.reasoning.formats import ReasoningFormat
from cluster.frontend.text import tail_of


class _Place(Enum):
    UNDECIDED = auto()
    """Nothing came yet but white space."""
    WITHIN = auto()
    BEHIND = auto()


class ReasoningReader:
    """Of one answer."""

    def __init__(
        self,
        form: ReasoningFormat,
        opened: bool | None,
        apart: bool = True,
        whole: bool = False,
    ) -> None:
        """`opened`: as of `ReasoningFormat.opened_by`; `apart`: else all text is the rest, as it
        is; `whole`: reasoning is given out when it ends, in one piece."""
        self._form = form
        self._apart, self._whole = apart, whole
        self._kept = ""
        """Reasoning that has no end yet, where it is given out whole."""
        self._place = {True: _Place.WITHIN, False: _Place.BEHIND, None: _Place.UNDECIDED}[opened]
        self._edge = opened is not None
        """Whether white space that comes next is dropped."""
        self._fresh = True
        """Whether no reasoning was given out; the target may repeat what its prompt ends with."""
        self._held = ""
        again = (form.begin, form.lead, form.header) if form.header else ()
        self._markup = tuple(filter(None, (*again, *form.markup)))
        """What is to be found behind reasoning."""

    @property
    def within(self) -> bool:
        """Whether what came last is reasoning."""
        return self._place is _Place.WITHIN

    @property
    def settled(self) -> bool:
        """Whether no reasoning can come any more."""
        return self._place is _Place.BEHIND and not self._form.header

    def push(self, text: str, ended: bool = False) -> tuple[str, str]:
        """The reasoning and the rest that this adds; `ended`: nothing comes any more."""
        reasoning, rest = self._parted(text, ended)
        if not self._apart:
            return "", text
        if self._whole:
            reasoning, self._kept = self._kept + reasoning, ""
            if self.within and not ended:
                self._kept, reasoning = reasoning, ""
        return reasoning, rest

    def _parted(self, text: str, ended: bool) -> tuple[str, str]:
        self._held += text
        reasoning, rest = "", ""
        moved = True
        while moved:
            match self._place:
                case _Place.UNDECIDED:
                    moved = self._decide(ended)
                case _Place.WITHIN:
                    said, moved = self._reason(ended)
                    reasoning += said
                case _Place.BEHIND:
                    said, moved = self._answer(ended)
                    rest += said
        return reasoning, rest

    # Each returns whether the text that is held has another place now.

    def _decide(self, ended: bool) -> bool:
        bare = self._held.lstrip()
        if bare.startswith(self._form.begin):
            self._go(_Place.WITHIN, bare[len(self._form.begin) :])
        elif ended or not self._form.begin.startswith(bare):
            self._place = _Place.BEHIND
        else:
            return False
        return True

    def _reason(self, ended: bool) -> tuple[str, bool]:
        begin, end = self._form.begin, self._form.end
        if self._edge:
            self._held = self._held.lstrip()
        if self._fresh and self._held.startswith(begin):
            self._go(_Place.WITHIN, self._held[len(begin) :])
            return "", True
        if self._fresh and begin.startswith(self._held) and not ended:
            return "", False
        if (at := self._held.find(end)) >= 0:
            said = self._held[:at].rstrip()
            self._go(_Place.BEHIND, self._held[at + len(end) :])
            return said, True
        kept = 0 if ended else tail_of(self._held, (end,))
        said = self._held[: len(self._held) - kept].rstrip()
        self._held = "" if ended else self._held[len(said) :]
        if said:
            self._fresh = self._edge = False
        return said, False

    def _answer(self, ended: bool) -> tuple[str, bool]:
        if self._edge:
            self._held = self._held.lstrip()
        said, kept = self._held, 0
        if self._markup:
            found = [(at, mark) for mark in self._markup if (at := said.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                self._go(
                    _Place.WITHIN if mark == self._form.begin else _Place.BEHIND,
                    said[at + len(mark) :],
                )
                return said[:at], True
            kept = 0 if ended else tail_of(said, self._markup)
        said = said[: len(said) - kept]
        self._held = self._held[len(said) :]
        self._edge &= not said
        return said, False

    def _go(self, place: _Place, held: str) -> None:
        self._place, self._held, self._edge, self._fresh = place, held, True, True
