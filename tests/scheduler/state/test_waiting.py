"""Proves the order of the queue: classes age, tenants share, deadlines count, and none starves.

That none is lost or doubled is checked after each event in `tests.sim`.
"""

from __future__ import annotations

import pickle
from random import Random

from scheduler.messages import Priority, Request
from scheduler.state.sequence import Sequence
from scheduler.state.waiting import WaitingQueue

AGE_S = 30.0


def sequence(
    number: int,
    arrived_s: float = 0.0,
    priority: Priority = Priority.NORMAL,
    tenant: str = "",
    tokens: int = 100,
    timeout_s: float | None = None,
) -> Sequence:
    request = Request(str(number), (1,), tokens - 1, priority=priority, tenant=tenant)
    deadline_s = None if timeout_s is None else arrived_s + timeout_s
    return Sequence(request, number, arrived_s, deadline_s)


def queue_of(*sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue(AGE_S)
    for one in sequences:
        queue.add(one)
    queue.check_integrity()
    return queue


def serve(queue: WaitingQueue, count: int) -> list[Sequence]:
    """The next `count` sequences, placed one after the other."""
    served = []
    for _ in range(min(count, len(queue))):
        first = next(iter(queue.values()))
        queue.remove(first)
        queue.charge(first)
        served.append(first)
    queue.check_integrity()
    return served


def test_without_classes_tenants_and_deadlines_it_is_first_come_first_served() -> None:
    queue = queue_of(*(sequence(number, 0.1 * number) for number in range(20)))
    assert [one.number for one in serve(queue, 20)] == list(range(20))


def test_a_higher_class_goes_first_until_the_lower_one_has_waited_long_enough() -> None:
    low = sequence(0, 0.0, Priority.LOW)
    assert list(queue_of(low, sequence(1, 2 * AGE_S - 1, Priority.HIGH))) == ["1", "0"]
    assert list(queue_of(low, sequence(1, 2 * AGE_S + 1, Priority.HIGH))) == ["0", "1"]
    assert list(queue_of(low, sequence(1, AGE_S - 1, Priority.NORMAL))) == ["1", "0"]
    assert list(queue_of(low, sequence(1, AGE_S + 1, Priority.NORMAL))) == ["0", "1"]


def test_no_class_starves_under_a_flood_of_a_higher_one() -> None:
    queue = queue_of(sequence(0, 0.0, Priority.LOW))
    for second in range(1, 200):
        queue.add(sequence(second, float(second), Priority.HIGH))
        queue.add(sequence(1000 + second, float(second), Priority.HIGH))
        if any(one.number == 0 for one in serve(queue, 1)):
            break
    # 2 arrive and 1 is served per second: the oldest of the others is half as old as the flood.
    assert second <= 4 * AGE_S + 2


def test_one_whose_tenant_was_served_most_passes_a_higher_class_all_the_same() -> None:
    """Though a tenant served less always has a young request before it, and takes it back."""
    served, low = sequence(0, 0.0, Priority.LOW, "served"), Priority.LOW
    queue = queue_of(served, sequence(1, 0.0, low, "served"))
    assert serve(queue, 1) == [served]
    for second in range(1, 200):
        young = sequence(1000 + second, float(second), low, "other")
        queue.add(young)
        queue.add(sequence(second + 1, float(second), Priority.HIGH))
        if any(one.number == 1 for one in serve(queue, 1)):
            break
        queue.remove(young)
    assert second <= 2 * AGE_S + 1


def test_tenants_share_by_tokens_however_many_requests_each_sends() -> None:
    """One floods the queue with short requests, one sends long ones, one has a few."""
    rng = Random(5)
    sequences = [sequence(number, tenant="flood", tokens=50) for number in range(400)]
    sequences += [sequence(1000 + number, tenant="long", tokens=400) for number in range(60)]
    sequences += [sequence(2000 + number, tenant="few", tokens=100) for number in range(200)]
    rng.shuffle(sequences)
    tokens = dict.fromkeys(("flood", "long", "few"), 0)
    for one in serve(queue_of(*sequences), 150):
        tokens[one.request.tenant] += one.length_max
    assert max(tokens.values()) - min(tokens.values()) <= 400


def test_a_tenant_gets_no_credit_for_a_pause() -> None:
    queue = queue_of(*(sequence(number, tenant="busy") for number in range(50)))
    serve(queue, 30)
    for number in range(100, 120):
        queue.add(sequence(number, tenant="back"))
    assert sum(one.request.tenant == "back" for one in serve(queue, 10)) in (5, 6)


def test_an_urgent_request_passes_those_that_can_wait_but_not_for_ever() -> None:
    patient = [sequence(number, float(number)) for number in range(3)]
    assert list(queue_of(*patient, sequence(9, 3.0, timeout_s=5.0))) == ["9", "0", "1", "2"]
    assert list(queue_of(*patient, sequence(9, 3.0, timeout_s=900.0))) == ["0", "1", "2", "9"]
    old = sequence(0, 0.0)
    assert list(queue_of(old, sequence(9, AGE_S + 1, timeout_s=0.5))) == ["0", "9"]


def test_those_that_lost_their_place_come_first_by_arrival() -> None:
    queue = queue_of(sequence(5, priority=Priority.HIGH))
    queue.add(sequence(4, priority=Priority.LOW), first=True)
    queue.add(sequence(2, tenant="x"), first=True)
    assert list(queue) == ["2", "4", "5"]


def test_a_long_life_leaves_nothing_behind() -> None:
    """Tenants, arrivals and charges of requests that are gone are forgotten."""
    queue = WaitingQueue(AGE_S)
    for number in range(5000):
        queue.add(sequence(number, float(number), tenant=f"tenant {number}"))
        if number % 3:
            serve(queue, 1)
        else:
            queue.remove(next(iter(queue.values())))
    for number in range(5000, 9000):  # nobody is served any more
        queue.add(sequence(number, float(number), tenant=f"tenant {number}"))
        queue.remove(next(iter(queue.values())))
    assert len(queue) == 0
    assert len(pickle.dumps(queue)) < 10_000, "all that it holds"
