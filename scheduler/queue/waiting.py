"""The queue of waiting sequences: in which order they are offered a place.

Knows priorities, tenants, arrivals and deadlines; nothing of replicas.

1. Sequences that lost their place come first, by arrival: a client is reading their stream. Those
   in quarantine come before the others.
2. Classes by the arrival of their oldest sequence plus `age_s` for each step of priority. So higher
   classes overtake a sequence only until it has waited `age_s` (or twice that) longer than theirs,
   and none starves. A class that is ahead in this way gives its oldest sequence and no other.
3. Within a class tenants share by start-time fair queueing: the tenant that was served least goes
   first, one that comes back after a pause gets no credit for it. A tenant is charged the tokens of
   a request, prompt and limit, once, when the request is placed.
   (P. Goyal, H. Vin, H. Cheng: Start-time Fair Queuing, SIGCOMM 1996.)
4. Within a tenant the one that is due first: `age_s` after its arrival, or at its deadline if that
   is sooner. Without deadlines this is first come, first served; with them an urgent request passes
   those that can wait, by `age_s` at most.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar

from scheduler.messages import Priority, Request

_SLACK = 64

Entry = tuple[float, int, str, int]
"""(time [s], number, id, tokens) of a sequence."""


class Waiting(Protocol):
    """What the queue reads of a sequence. None of it changes while the sequence waits."""

    id: str
    number: int
    """Rises with every accepted request."""
    request: Request
    length_max: int
    """Prompt and limit in tokens."""
    arrived_s: float
    deadline_s: float | None

    @property
    def tokens_left(self) -> int:
        """What it may still commit."""

    @property
    def quarantined(self) -> bool: ...


Item = TypeVar("Item", bound=Waiting)


class _Tenant:
    """One tenant's waiting sequences of one class, by when they are due."""

    def __init__(self, served: float) -> None:
        self.served = served
        """Tokens charged, on the class's scale of virtual time."""
        self.due: list[Entry] = []


class _PriorityClass:
    """The waiting sequences of one priority."""

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant] = {}
        """Those that wait, and those that were served more than `self.served`."""
        self.order: list[tuple[float, str]] = []
        """(served, tenant) of those that wait, the least served first."""
        self.served = 0.0
        """The class's virtual time: where a tenant begins that comes anew."""
        self.arrivals: list[Entry] = []

    def add(self, tenant_name: str, due: Entry, arrival: Entry) -> None:
        tenant = self.tenants.get(tenant_name)
        if tenant is None:
            tenant = self.tenants[tenant_name] = _Tenant(self.served)
        if not tenant.due:
            tenant.served = max(tenant.served, self.served)
            insort(self.order, (tenant.served, tenant_name))
        insort(tenant.due, due)
        insort(self.arrivals, arrival)

    def remove(self, tenant_name: str, due: Entry, arrival: Entry) -> None:
        tenant = self.tenants[tenant_name]
        del tenant.due[bisect_left(tenant.due, due)]
        del self.arrivals[bisect_left(self.arrivals, arrival)]
        if not tenant.due:
            del self.order[bisect_left(self.order, (tenant.served, tenant_name))]
        self._forget()

    def charge(self, tenant_name: str, tokens: int) -> None:
        """The tenant is served; no other request of it may wait."""
        tenant = self.tenants.get(tenant_name)
        if tenant is None:
            tenant = self.tenants[tenant_name] = _Tenant(self.served)
        before = tenant.served
        # A request may be placed out of turn, because it fits where those before it do not: time
        # never passes the least served one that waits.
        least = self.order[0][0] if self.order else before
        self.served = max(self.served, min(before, least))
        tenant.served += tokens
        if tenant.due:
            del self.order[bisect_left(self.order, (before, tenant_name))]
            insort(self.order, (tenant.served, tenant_name))
        self._forget()

    def _forget(self) -> None:
        """Drops tenants that do not wait and were served no more than others, now and then."""
        if not self.arrivals and self.tenants:
            # Where none waits none is owed anything.
            self.served = max(tenant.served for tenant in self.tenants.values())
            self.tenants.clear()
        elif len(self.tenants) > 2 * len(self.order) + _SLACK:
            self.tenants = {
                name: tenant
                for name, tenant in self.tenants.items()
                if tenant.due or tenant.served > self.served
            }

    def in_order(self) -> Iterator[str]:
        """Ids as they would be served, one after the other. O(log n) for each."""
        order = self.order
        upcoming = 0
        ahead: list[tuple[float, str, Entry, Iterator[Entry]]] = []
        """(served, tenant, next, those after it): tenants of which a sequence was given out."""
        while upcoming < len(order) or ahead:
            if upcoming < len(order) and (not ahead or order[upcoming] <= ahead[0][:2]):
                served, name = order[upcoming]
                upcoming += 1
                others = iter(self.tenants[name].due)
                key = next(others)
            else:
                served, name, key, others = heapq.heappop(ahead)
            yield key[2]
            following = next(others, None)
            if following is not None:
                served += key[3]
                heapq.heappush(ahead, (served, name, following, others))


class WaitingQueue(Mapping[str, Item]):
    """Waiting sequences by id; iterates in the order in which they are to be placed."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._sequences: dict[str, Item] = {}
        self._first: list[tuple[bool, int, str]] = []
        """(not in quarantine, number, id) of those that come before all classes."""
        self._classes = {priority: _PriorityClass() for priority in Priority}
        self.tokens = 0
        """Prompt and limit of all that wait."""
        self.tokens_left = 0
        """What they may still commit."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, sequence_id: str) -> Item:
        return self._sequences[sequence_id]

    def __iter__(self) -> Iterator[str]:
        for *_, sequence_id in self._first:
            yield sequence_id
        classes = {name: one for name, one in self._classes.items() if one.arrivals}
        by_turn = {name: one.in_order() for name, one in classes.items()}
        by_age = {name: iter(one.arrivals) for name, one in classes.items()}
        oldest = {name: next(arrivals) for name, arrivals in by_age.items()}
        given: set[str] = set()
        while oldest:
            name = min(oldest, key=lambda one: (oldest[one][0] + self._age_s * one, one))
            if name == min(oldest):
                sequence_id = next(one for one in by_turn[name] if one not in given)
            else:
                # It has waited long enough to pass a higher class; the rest of its class has not.
                sequence_id = oldest[name][2]
            given.add(sequence_id)
            yield sequence_id
            if oldest[name][2] in given:
                del oldest[name]
                for one in by_age[name]:
                    if one[2] not in given:
                        oldest[name] = one
                        break

    def quarantined(self) -> Iterator[Item]:
        """Those in quarantine, by arrival."""
        for healthy, _, sequence_id in self._first:
            if healthy:
                return
            yield self._sequences[sequence_id]

    def add(self, sequence: Item, first: bool = False) -> None:
        """`first`: it lost its place and comes before all classes; so does one in quarantine."""
        assert sequence.id not in self._sequences, f"{sequence.id} waits already"
        self._sequences[sequence.id] = sequence
        self.tokens += sequence.length_max
        self.tokens_left += sequence.tokens_left
        if first or sequence.quarantined:
            insort(self._first, _first(sequence))
        else:
            request = sequence.request
            one = self._classes[request.priority]
            one.add(request.tenant, self._due(sequence), _arrival(sequence))

    def remove(self, sequence: Item) -> None:
        """It waits no longer, for whatever reason."""
        del self._sequences[sequence.id]
        self.tokens -= sequence.length_max
        self.tokens_left -= sequence.tokens_left
        at = bisect_left(self._first, _first(sequence))
        if at < len(self._first) and self._first[at] == _first(sequence):
            del self._first[at]
            return
        request = sequence.request
        one = self._classes[request.priority]
        one.remove(request.tenant, self._due(sequence), _arrival(sequence))

    def charge(self, sequence: Item) -> None:
        """It has been placed: its tenant was served. Call it once for each request."""
        request = sequence.request
        self._classes[request.priority].charge(request.tenant, sequence.length_max)

    def _due(self, sequence: Item) -> Entry:
        due_s = sequence.arrived_s + self._age_s
        if sequence.deadline_s is not None:
            due_s = min(due_s, sequence.deadline_s)
        return (due_s, sequence.number, sequence.id, sequence.length_max)

    def check_integrity(self) -> None:
        """Every waiting sequence is in exactly one place; for tests."""
        inside = list(self)
        assert len(inside) == len(set(inside)), "a sequence waits in two places"
        assert set(inside) == set(self._sequences), "the order differs from the queue"
        assert self.tokens == sum(one.length_max for one in self._sequences.values()), "tokens"
        left = sum(one.tokens_left for one in self._sequences.values())
        assert self.tokens_left == left, "tokens left"
        for one in self._classes.values():
            assert one.order == sorted(one.order), "tenants are out of order"
            waiting = {name for name, tenant in one.tenants.items() if tenant.due}
            assert {name for _, name in one.order} == waiting, "tenants differ"
            size = sum(len(tenant.due) for tenant in one.tenants.values())
            assert len(one.arrivals) == size, "arrivals differ"


def _first(sequence: Waiting) -> tuple[bool, int, str]:
    return (not sequence.quarantined, sequence.number, sequence.id)


def _arrival(sequence: Waiting) -> Entry:
    return (sequence.arrived_s, sequence.number, sequence.id, sequence.length_max)
