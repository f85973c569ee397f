"""The queue of waiting sequences: in which order they are offered a place.

Knows priorities, tenants, arrivals and deadlines; nothing of replicas.

1. Sequences that lost their place through no fault of their own come first, by arrival: a client
   is reading their stream.
2. Classes by the arrival of their oldest sequence plus `age_s` for each step of priority. So a
   class is overtaken by higher ones only until its oldest has waited `age_s` (or twice that) longer
   than theirs, and none starves.
3. Within a class tenants share by start-time fair queueing: the tenant that was served least goes
   first, one that comes back after a pause gets no credit for it. Served are a request's tokens,
   prompt and limit, charged once, when it is placed.
   (P. Goyal, H. Vin, H. Cheng: Start-time Fair Queuing, SIGCOMM 1996.)
4. Within a tenant the one that is due first: `age_s` after its arrival, or at its deadline if that
   is sooner. Without deadlines this is first come, first served; with them an urgent request passes
   those that can wait, by `age_s` at most.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, ValuesView

from scheduler.messages import Priority
from scheduler.sequence import Sequence

_SLACK = 64

_Due = tuple[float, int, str]
"""(due [s], number, id)."""


class _Tenant:
    """One tenant's waiting sequences of one class."""

    def __init__(self, served: float) -> None:
        self.served = served
        """Tokens charged, on the class's scale of virtual time."""
        self._due: list[_Due] = []
        self._head = 0
        """Entries before it are gone: a queue is emptied from its front mostly."""

    def __len__(self) -> int:
        return len(self._due) - self._head

    def add(self, key: _Due) -> None:
        insort(self._due, key, lo=self._head)

    def remove(self, key: _Due) -> None:
        at = bisect_left(self._due, key, lo=self._head)
        assert self._due[at] == key, f"{key[2]} does not wait"
        if at == self._head:
            self._head += 1
            if self._head > _SLACK and 2 * self._head > len(self._due):
                del self._due[: self._head]
                self._head = 0
        else:
            del self._due[at]

    def at(self, index: int) -> _Due | None:
        """The entry at this place in the order, or None beyond the last."""
        index += self._head
        return self._due[index] if index < len(self._due) else None


class _Class:
    """The waiting sequences of one priority."""

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant] = {}
        """Those who wait, and those who were served more than `self.served`."""
        self.order: list[tuple[float, str]] = []
        """(served, tenant) of those who wait, the least served first."""
        self.served = 0.0
        """The class's virtual time: where the tenant served last stood before."""
        self.arrivals: list[tuple[float, int, str]] = []
        """A heap; entries of sequences that wait no longer go when they come up."""
        self.size = 0

    def add(self, tenant_name: str, key: _Due, arrived_s: float) -> None:
        tenant = self.tenants.get(tenant_name)
        if tenant is None:
            tenant = self.tenants[tenant_name] = _Tenant(self.served)
        if not len(tenant):
            tenant.served = max(tenant.served, self.served)
            insort(self.order, (tenant.served, tenant_name))
        tenant.add(key)
        heapq.heappush(self.arrivals, (arrived_s, key[1], key[2]))
        self.size += 1

    def remove(self, tenant_name: str, key: _Due) -> None:
        tenant = self.tenants[tenant_name]
        tenant.remove(key)
        self.size -= 1
        if not len(tenant):
            del self.order[bisect_left(self.order, (tenant.served, tenant_name))]
            self._forget(tenant_name)
        self._forget_all_if_idle()

    def charge(self, tenant_name: str, tokens: int) -> None:
        """The tenant is served; it may have nobody else who waits."""
        tenant = self.tenants.get(tenant_name)
        if tenant is None:
            tenant = self.tenants[tenant_name] = _Tenant(self.served)
        before = tenant.served
        self.served = max(self.served, before)
        tenant.served += tokens
        if len(tenant):
            del self.order[bisect_left(self.order, (before, tenant_name))]
            insort(self.order, (tenant.served, tenant_name))
        self._forget_all_if_idle()

    def _forget_all_if_idle(self) -> None:
        """Where nobody waits nobody is owed anything."""
        if not self.size and self.tenants:
            self.served = max(tenant.served for tenant in self.tenants.values())
            self.tenants.clear()

    def _forget(self, tenant_name: str) -> None:
        tenant = self.tenants[tenant_name]
        if not len(tenant) and tenant.served <= self.served:
            del self.tenants[tenant_name]

    def in_order(self, cost: Mapping[str, Sequence]) -> Iterator[str]:
        """Ids as they would be served, one after the other. O(log n) for each."""
        order = self.order
        upcoming = 0
        ahead: list[tuple[float, str, int]] = []
        """(served, tenant, place): tenants of whom one or more were given out already."""
        while upcoming < len(order) or ahead:
            if upcoming < len(order) and (not ahead or order[upcoming] <= ahead[0][:2]):
                served, name = order[upcoming]
                upcoming += 1
                place = 0
            else:
                served, name, place = heapq.heappop(ahead)
            tenant = self.tenants[name]
            key = tenant.at(place)
            assert key is not None
            yield key[2]
            if tenant.at(place + 1) is not None:
                served += _tokens(cost[key[2]])
                heapq.heappush(ahead, (served, name, place + 1))


class WaitingQueue(Mapping[str, Sequence]):
    """Waiting sequences by id; iterates in the order in which they are to be placed."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._sequences: dict[str, Sequence] = {}
        self._first: list[tuple[int, str]] = []
        """(number, id) of those who come before all classes."""
        self._classes = {priority: _Class() for priority in Priority}
        self.tokens = 0
        """Prompt and limit of all that wait."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._sequences

    def __getitem__(self, sequence_id: str) -> Sequence:
        return self._sequences[sequence_id]

    def __iter__(self) -> Iterator[str]:
        for _, sequence_id in self._first:
            yield sequence_id
        for one in sorted(self._classes, key=self._urgency):
            yield from self._classes[one].in_order(self._sequences)

    def values(self) -> ValuesView[Sequence]:
        return ValuesView(self)

    def add(self, sequence: Sequence, first: bool = False) -> None:
        """`first`: it lost its place and comes before all classes."""
        assert sequence.id not in self._sequences, f"{sequence.id} waits already"
        self._sequences[sequence.id] = sequence
        self.tokens += sequence.length_max
        if first:
            insort(self._first, (sequence.number, sequence.id))
        else:
            request = sequence.request
            self._classes[request.priority].add(
                request.tenant, self._key(sequence), sequence.arrived_s
            )

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer, for whatever reason."""
        del self._sequences[sequence.id]
        self.tokens -= sequence.length_max
        at = bisect_left(self._first, (sequence.number, sequence.id))
        if at < len(self._first) and self._first[at] == (sequence.number, sequence.id):
            del self._first[at]
            return
        request = sequence.request
        one = self._classes[request.priority]
        one.remove(request.tenant, self._key(sequence))
        if len(one.arrivals) > 2 * one.size + _SLACK:
            one.arrivals = [entry for entry in one.arrivals if self._waits(entry)]
            heapq.heapify(one.arrivals)

    def charge(self, sequence: Sequence) -> None:
        """It has been placed: its tenant was served. Call it once for each request."""
        request = sequence.request
        self._classes[request.priority].charge(request.tenant, _tokens(sequence))

    def _key(self, sequence: Sequence) -> _Due:
        due_s = sequence.arrived_s + self._age_s
        if sequence.deadline_s is not None:
            due_s = min(due_s, sequence.deadline_s)
        return (due_s, sequence.number, sequence.id)

    def _urgency(self, priority: Priority) -> tuple[float, Priority]:
        arrivals = self._classes[priority].arrivals
        while arrivals and not self._waits(arrivals[0]):
            heapq.heappop(arrivals)
        oldest_s = arrivals[0][0] if arrivals else float("inf")
        return (oldest_s + self._age_s * priority, priority)

    def _waits(self, entry: tuple[float, int, str]) -> bool:
        """Whether an entry of the arrivals is of a sequence that waits; the id may be reused."""
        sequence = self._sequences.get(entry[2])
        return sequence is not None and sequence.number == entry[1]

    def check_integrity(self) -> None:
        """Every waiting sequence is in exactly one place; for tests."""
        inside = list(self)
        assert len(inside) == len(set(inside)), "a sequence waits in two places"
        assert set(inside) == set(self._sequences), "the order differs from the queue"
        assert self.tokens == sum(one.length_max for one in self._sequences.values()), "tokens"
        for one in self._classes.values():
            assert one.order == sorted(one.order), "tenants are out of order"
            waiting = {name for name, tenant in one.tenants.items() if len(tenant)}
            assert {name for _, name in one.order} == waiting, "tenants differ"
            assert one.size == sum(map(len, one.tenants.values())), "the size of a class"


def _tokens(sequence: Sequence) -> int:
    """What a request costs its tenant."""
    return sequence.length_max
