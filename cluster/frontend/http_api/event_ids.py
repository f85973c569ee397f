"""Ids of a stream's events: behind each a client may go on, at any frontend."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.errors import InvalidRequest

_LAST_EVENT_ID = "last-event-id"
_PLACE = r"\d{1,9}e?"
_EVENT_ID = re.compile(
    rf"((?:chat)?cmpl-[0-9a-f]{{32}}):(\d{{1,19}}):({_PLACE}(?:,{_PLACE})*)(:usage)?", re.ASCII
)


class Place(NamedTuple):
    """How far a client is with one sequence. Each event has tokens or the end, or both."""

    tokens: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class EventId:
    """With it as Last-Event-ID a client goes on behind the event."""

    answer: str
    """The answer's own id."""
    seed: int
    """Of its first sequence; 0: it is not sampled."""
    places: Sequence[Place]
    """One for each sequence."""
    told_usage: bool = False
    """Whether it is the usage's, which ends the stream."""

    def __str__(self) -> str:
        places = ",".join(f"{tokens}" + "e" * ended for tokens, ended in self.places)
        return f"{self.answer}:{self.seed}:{places}" + (":usage" if self.told_usage else "")

    @classmethod
    def parse(cls, text: str, sequences: int, stream: bool) -> EventId:
        """Of a request for so many sequences. Raises InvalidRequest."""
        if not stream:
            raise InvalidRequest(_LAST_EVENT_ID, "only with stream")
        if (found := _EVENT_ID.fullmatch(text)) is None:
            raise InvalidRequest(_LAST_EVENT_ID, "is no id of an event of ours")
        answer, seed, told, usage = found.groups()
        places = [Place(int(place.rstrip("e")), place.endswith("e")) for place in told.split(",")]
        if len(places) != sequences:
            raise InvalidRequest(
                _LAST_EVENT_ID, f"is of an answer with {len(places)} sequences, not {sequences}"
            )
        return cls(answer, int(seed), places, usage is not None)
