"""The queue of waiting sequences: in which order they are offered a place.

Knows priorities, tenants, arrivals and deadlines; nothing of replicas. What it reads of a sequence
does not change while the sequence waits.

1. Sequences that lost their place come first, by arrival: a client is reading their stream. Those
   in quarantine come before the others.
2. Higher classes. But a sequence of a lower one passes those that are due `age_s` later for each
   step of priority, whatever its tenant was served; so none starves behind a higher class.
3. Within a class tenants share by start-time fair queueing: the tenant that was served least goes
   first, one that comes back after a pause gets no credit for it. A tenant is charged the tokens of
   a request, prompt and limit, once, when the request is placed.
   (P. Goyal, H. Vin, H. Cheng: Start-time Fair Queuing, SIGCOMM 1996.)
4. Within a tenant, and of tenants that were served alike, the one that is due first: `age_s` after
   its arrival, or at its deadline if that is sooner. Without deadlines this is first come, first
   served; with them an urgent request passes those that can wait, by `age_s` at most.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from scheduler.messages import Priority
from scheduler.state.sequence import Sequence

_SLACK = 64

Entry = tuple[float, int, str, int]
"""(due [s], number, id, tokens) of a sequence."""


class _PriorityClass:
    """The waiting sequences of one priority."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Entry]] = {}
        """By tenant, the first due first."""
        self.served: dict[str, float] = {}
        """Tokens charged, on a scale of virtual time: of the tenants that wait, and of those that
        were served more than `self.time`."""
        self.time = 0.0
        """Where a tenant begins that comes anew."""

    def add(self, tenant: str, entry: Entry) -> None:
        if tenant not in self.waiting:
            self.waiting[tenant] = []
            self.served[tenant] = max(self.served.get(tenant, 0.0), self.time)
        insort(self.waiting[tenant], entry)

    def remove(self, tenant: str, entry: Entry) -> None:
        due = self.waiting[tenant]
        del due[bisect_left(due, entry)]
        if not due:
            del self.waiting[tenant]
        self._forget()

    def charge(self, tenant: str, tokens: int) -> None:
        """The tenant is served; no other request of it may wait."""
        before = max(self.served.get(tenant, 0.0), self.time)
        # A request may be placed out of turn, because it fits where those before it do not: time
        # never passes the least served one that waits.
        least = min((self.served[name] for name in self.waiting), default=before)
        self.time = min(before, least)
        self.served[tenant] = before + tokens
        self._forget()

    def _forget(self) -> None:
        """Drops tenants that do not wait and were served no more than others, now and then."""
        if not self.waiting:
            self.served.clear()  # where none waits none is owed anything
        elif len(self.served) > 2 * len(self.waiting) + _SLACK:
            self.served = {
                name: served
                for name, served in self.served.items()
                if name in self.waiting or served > self.time
            }

    def in_order(self) -> Iterator[Entry]:
        """As they would be served, one after the other. O(tenants), and O(log n) for each."""
        ahead = [(self.served[name], due[0], name, 0) for name, due in self.waiting.items()]
        heapq.heapify(ahead)
        while ahead:
            served, entry, name, at = ahead[0]
            yield entry
            due = self.waiting[name]
            if at + 1 < len(due):
                heapq.heapreplace(ahead, (served + entry[3], due[at + 1], name, at + 1))
            else:
                heapq.heappop(ahead)


class WaitingQueue(Mapping[str, Sequence]):
    """Waiting sequences by id; iterates in the order in which they are to be placed."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._sequences: dict[str, Sequence] = {}
        self._first: list[tuple[bool, int, str]] = []
        """(not in quarantine, number, id) of those that come before all classes."""
        self._classes = {priority: _PriorityClass() for priority in Priority}
        self.tokens = 0
        """Prompt and limit of all that wait."""
        self.tokens_left = 0
        """What they may still commit."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, sequence_id: str) -> Sequence:
        return self._sequences[sequence_id]

    def __iter__(self) -> Iterator[str]:
        for *_, sequence_id in self._first:
            yield sequence_id
        given: set[str] = set()
        for priority in self._classes:
            behind = heapq.merge(*(self._by_age(lower) for lower in Priority if lower > priority))
            passing = next(behind, None)
            for due_s, _, sequence_id, _ in self._classes[priority].in_order():
                while passing is not None and passing[0] < due_s + self._age_s * priority:
                    if passing[2] not in given:
                        given.add(passing[2])
                        yield passing[2]
                    passing = next(behind, None)
                if sequence_id not in given:
                    given.add(sequence_id)
                    yield sequence_id

    def _by_age(self, priority: Priority) -> Iterator[Entry]:
        """Sequences of a class, the first due first, each as much later as its class counts."""
        for due_s, number, name, tokens in heapq.merge(*self._classes[priority].waiting.values()):
            yield due_s + self._age_s * priority, number, name, tokens

    def quarantined(self) -> Iterator[Sequence]:
        """Those in quarantine, by arrival."""
        for healthy, _, sequence_id in self._first:
            if healthy:
                return
            yield self._sequences[sequence_id]

    def add(self, sequence: Sequence, first: bool = False) -> None:
        """`first`: it lost its place and comes before all classes; so does one in quarantine."""
        assert sequence.id not in self._sequences, f"{sequence.id} waits already"
        self._sequences[sequence.id] = sequence
        self.tokens += sequence.request.length_expected
        self.tokens_left += sequence.tokens_left
        if first or sequence.quarantined:
            insort(self._first, _first(sequence))
        else:
            request = sequence.request
            self._classes[request.priority].add(request.tenant, self._entry(sequence))

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer, for whatever reason."""
        del self._sequences[sequence.id]
        self.tokens -= sequence.request.length_expected
        self.tokens_left -= sequence.tokens_left
        at = bisect_left(self._first, _first(sequence))
        if at < len(self._first) and self._first[at] == _first(sequence):
            del self._first[at]
            return
        request = sequence.request
        self._classes[request.priority].remove(request.tenant, self._entry(sequence))

    def charge(self, sequence: Sequence) -> None:
        """It has been placed: its tenant was served. Call it once for each request."""
        request = sequence.request
        self._classes[request.priority].charge(request.tenant, sequence.request.length_expected)

    def _entry(self, sequence: Sequence) -> Entry:
        due_s = sequence.arrived_s + self._age_s
        if sequence.deadline_s is not None:
            due_s = min(due_s, sequence.deadline_s)
        return (due_s, sequence.number, sequence.id, sequence.request.length_expected)

    def check_integrity(self) -> None:
        """Every waiting sequence is in exactly one place; for tests."""
        inside = list(self)
        assert len(inside) == len(set(inside)), "a sequence waits in two places"
        assert set(inside) == set(self._sequences), "the order differs from the queue"
        rows = self._sequences.values()
        assert self.tokens == sum(row.request.length_expected for row in rows), "tokens"
        assert self.tokens_left == sum(row.tokens_left for row in rows), "tokens left"
        for queue in self._classes.values():
            assert all(due and due == sorted(due) for due in queue.waiting.values()), "due"
            assert queue.waiting.keys() <= queue.served.keys(), "tenants differ"
            least = min((queue.served[name] for name in queue.waiting), default=queue.time)
            assert queue.time <= least, "time has passed a tenant that waits"


def _first(sequence: Sequence) -> tuple[bool, int, str]:
    return (not sequence.quarantined, sequence.number, sequence.id)
