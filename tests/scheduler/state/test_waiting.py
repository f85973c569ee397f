"""Proves the order of the queue: classes age, tenants share, deadlines count, and none starves.

That none is lost or doubled is checked after each event in `tests.sim`.
"""

from __future__ import annotations

import math
import pickle
from random import Random

from hypothesis import given, strategies as st

from scheduler.messages import FailureRecord, Priority, Request
from scheduler.state.sequence import Sequence
from scheduler.state.waiting import WaitingQueue
from tests.scheduler.hand import Hand

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
    for queued in sequences:
        queue.add(queued)
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
    assert [queued.number for queued in serve(queue, 20)] == list(range(20))


def test_a_higher_class_goes_first_until_the_lower_one_has_waited_long_enough() -> None:
    low = sequence(0, 0.0, Priority.LOW)
    assert list(queue_of(low, sequence(1, 2 * AGE_S, Priority.HIGH))) == ["1", "0"]
    assert list(queue_of(low, sequence(1, 2 * AGE_S + 1, Priority.HIGH))) == ["0", "1"]
    assert list(queue_of(low, sequence(1, AGE_S, Priority.NORMAL))) == ["1", "0"]
    assert list(queue_of(low, sequence(1, AGE_S + 1, Priority.NORMAL))) == ["0", "1"]


def test_no_class_starves_under_a_flood_of_a_higher_one() -> None:
    queue = queue_of(sequence(0, 0.0, Priority.LOW))
    for second in range(1, 200):
        queue.add(sequence(second, float(second), Priority.HIGH))
        queue.add(sequence(1000 + second, float(second), Priority.HIGH))
        if any(queued.number == 0 for queued in serve(queue, 1)):
            break
    # 2 arrive and 1 is served per second: the oldest of the others is half as old as the flood.
    assert second <= 4 * AGE_S + 2


def test_what_a_tenant_was_served_stays_known_while_hundreds_of_others_come_and_go() -> None:
    queue = queue_of(sequence(0, tenant="patient"), sequence(999, tenant="greedy"))
    tenants = ["greedy", *[f"visitor {number}" for number in range(200)] * 2]
    for number, tenant in enumerate(tenants, 1):  # each placed out of turn: it fits, others do not
        placed = sequence(number, tenant=tenant, tokens=10_000 if tenant == "greedy" else 10)
        queue.add(placed)
        queue.remove(placed)
        queue.charge(placed)
    queue.add(sequence(501, tenant="visitor 7"))
    queue.add(sequence(502, tenant="new"))
    queue.check_integrity()
    assert list(queue) == ["0", "502", "501", "999"]


def test_of_what_a_tenant_was_served_while_none_waited_nothing_is_held_against_it() -> None:
    queue = queue_of(sequence(0, tenant="early", tokens=10_000))
    serve(queue, 1)
    queue.add(sequence(1, tenant="early"))
    queue.add(sequence(2, tenant="late"))
    assert list(queue) == ["1", "2"]


def test_it_is_listed_in_the_order_in_which_its_tenants_are_served() -> None:
    """The tenant x is charged 100 tokens and then 70, y is charged 150."""
    x = [sequence(number, tenant="x", tokens=tokens) for number, tokens in enumerate((100, 70, 9))]
    y = [sequence(number, tenant="y", tokens=tokens) for number, tokens in ((3, 150), (4, 9))]
    queue = queue_of(*x, *y)
    assert list(queue) == ["0", "3", "1", "4", "2"]
    assert [queued.id for queued in serve(queue, 5)] == ["0", "3", "1", "4", "2"]


def test_a_tenant_that_comes_begins_where_the_last_one_began_that_was_served() -> None:
    """And not where those are that wait, which have been served more."""
    queue = queue_of(*(sequence(number, tenant=tenant) for number, tenant in enumerate("xxy")))
    assert [queued.id for queued in serve(queue, 2)] == ["0", "2"]
    queue.add(sequence(3, tenant="new"))
    assert list(queue) == ["3", "1"]


def test_one_that_comes_before_all_classes_is_charged_from_where_its_class_stands() -> None:
    others = [sequence(number, tenant="y") for number in (1, 2, 3)]
    queue = queue_of(sequence(0, tenant="x", tokens=10), *others)
    assert [queued.id for queued in serve(queue, 3)] == ["0", "1", "2"]
    queue.add(sequence(4, tenant="x", tokens=50), first=True)
    assert [queued.id for queued in serve(queue, 1)] == ["4"]
    queue.add(sequence(5, tenant="x"))
    queue.add(sequence(6, tenant="new"))
    assert list(queue) == ["6", "5", "3"]


def test_a_tenant_is_charged_as_soon_as_a_replica_takes_its_request() -> None:
    hand = Hand(residents_max=1)
    for name, tenant in (("x1", "x"), ("x2", "x"), ("y1", "y")):
        hand.submit(name, tenant=tenant)
    hand.join()
    assert hand.waiting() == ["y1", "x2"]


def test_one_whose_tenant_was_served_most_passes_a_higher_class_all_the_same() -> None:
    """Though a tenant served less always has a young request before it, and takes it back."""
    served, low = sequence(0, 0.0, Priority.LOW, "served"), Priority.LOW
    queue = queue_of(served, sequence(1, 0.0, low, "served"))
    assert serve(queue, 1) == [served]
    for second in range(1, 200):
        young = sequence(1000 + second, float(second), low, "other")
        queue.add(young)
        queue.add(sequence(second + 1, float(second), Priority.HIGH))
        if any(queued.number == 1 for queued in serve(queue, 1)):
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
    for queued in serve(queue_of(*sequences), 150):
        tokens[queued.request.tenant] += queued.length_max
    assert max(tokens.values()) - min(tokens.values()) <= 400


def test_a_tenant_gets_no_credit_for_a_pause() -> None:
    queue = queue_of(*(sequence(number, tenant="busy") for number in range(50)))
    serve(queue, 30)
    for number in range(100, 120):
        queue.add(sequence(number, tenant="back"))
    assert sum(queued.request.tenant == "back" for queued in serve(queue, 10)) in (5, 6)


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


def by_the_rules(sequences: list[Sequence], served: dict[tuple[int, str], int]) -> list[int]:
    """The order of those that wait, class by class and one at a time."""

    def due_s(one: Sequence) -> float:
        return min(one.arrived_s + AGE_S, math.inf if one.deadline_s is None else one.deadline_s)

    def aged(one: Sequence) -> tuple[float, int]:
        return due_s(one) + AGE_S * one.request.priority, one.number

    served, order, left = dict(served), [], list(sequences)
    for priority in Priority:
        # Charged in this order though others pass them: the order is that of the class alone.
        own = [queued for queued in sequences if queued.request.priority == priority]
        while own:
            heads = [
                min(
                    (queued for queued in own if queued.request.tenant == tenant),
                    key=lambda queued: (due_s(queued), queued.number),
                )
                for tenant in {queued.request.tenant for queued in own}
            ]
            best = min(
                heads,
                key=lambda queued: (
                    served[priority, queued.request.tenant],
                    due_s(queued),
                    queued.number,
                ),
            )
            served[priority, best.request.tenant] += best.length_max
            own.remove(best)
            lower = [queued for queued in left if queued.request.priority > priority]
            passing = [
                queued for queued in sorted(lower, key=aged) if aged(queued)[0] < aged(best)[0]
            ]
            for queued in [*passing, best]:
                if queued in left:
                    left.remove(queued)
                    order.append(queued.number)
    return order


ANY = st.tuples(
    st.integers(0, 200), st.sampled_from(Priority), st.sampled_from("ab"), st.integers(2, 90)
)


@given(st.lists(st.tuples(ANY, st.none() | st.integers(1, 90)), max_size=9), st.integers(0, 4))
def test_the_order_is_that_of_the_rules(
    requests: list[tuple[tuple[int, Priority, str, int], int | None]], places: int
) -> None:
    """Also after some were placed, for which their tenants are charged."""
    left = [
        sequence(number, float(at), priority, tenant, tokens, timeout_s)
        for number, ((at, priority, tenant, tokens), timeout_s) in enumerate(requests)
    ]
    queue = queue_of(*left)
    served = {(priority, tenant): 0 for priority in Priority for tenant in "ab"}
    for _ in range(places):
        assert [int(name) for name in queue] == by_the_rules(left, served)
        for queued in serve(queue, 1):
            left.remove(queued)
            served[queued.request.priority, queued.request.tenant] += queued.length_max
    assert queue.tokens == sum(queued.length_max for queued in left)
    assert queue.tokens_left == sum(queued.tokens_left for queued in left)


def test_those_in_quarantine_come_before_all_others_and_are_told_apart() -> None:
    queue = queue_of(sequence(1, priority=Priority.HIGH))
    queue.add(sequence(2), first=True)
    for number in (5, 4):
        one = sequence(number, priority=Priority.LOW)
        one.record = FailureRecord(rows_limit=1)
        queue.add(one)
    assert list(queue) == ["4", "5", "2", "1"]
    assert [queued.number for queued in queue.quarantined()] == [4, 5]
    assert [queued.number for queued in serve(queue, 3)] == [4, 5, 2]
    assert list(queue.quarantined()) == []


def test_a_long_life_leaves_nothing_behind() -> None:
    """Tenants, arrivals and charges of requests that are gone are forgotten."""
    queue = WaitingQueue(AGE_S)
    for number in range(5000):
        queue.add(sequence(number, float(number), tenant=f"tenant {number}"))
        if number % 3:
            serve(queue, 1)
        else:
            queue.remove(next(iter(queue.values())))
    assert len(queue) == 0
    patient = sequence(5000, 5000.0, tenant="patient")
    queue.add(patient)
    for number in range(5001, 9000):  # nobody is served any more, and one waits all the time
        cancelled = sequence(number, float(number), tenant=f"tenant {number}")
        queue.add(cancelled)
        queue.remove(cancelled)
    assert [*queue.values()] == [patient]
    assert len(pickle.dumps(queue)) < 10_000, "all that it holds"
