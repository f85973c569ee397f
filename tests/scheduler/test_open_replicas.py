"""Proves that the indices of replicas by load are right whenever somebody asks, whatever happened
in between, and that a look at them changes nothing and finds what nobody has told them.
"""

from __future__ import annotations

from random import Random

import pytest

from scheduler.config import SchedulerConfig
from scheduler.messages import Batch, BatchKind, ReplicaSpec, Request
from scheduler.open_replicas import OpenReplicas
from scheduler.residents import Replica
from scheduler.sequence import Sequence

SPEC = ReplicaSpec(kv_blocks=100, block_size=16, context_len=512, vocab_size=50)
CONFIG = SchedulerConfig(residents_max=4, batches_in_flight_max=2)


def add_resident(replica: Replica, number: int) -> None:
    replica.residents[str(number)] = Sequence(Request(str(number), (1,), 5), number)


def add_batch(replica: Replica, number: int) -> None:
    replica.batches[number] = Batch(number, replica.id, BatchKind.SPECULATE)


def searched(replicas: list[Replica]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Both indices by a search of all."""
    takes = [one for one in replicas if not one.draining and one.load < CONFIG.residents_max]
    place = [one for one in takes if len(one.batches) < CONFIG.batches_in_flight_max]
    return (
        sorted((one.load, one.id) for one in takes),
        sorted((one.load, one.id) for one in place),
    )


@pytest.mark.parametrize("seed", range(30))
def test_it_says_what_a_search_of_all_says(seed: int) -> None:
    """Replicas come, also again under the id of one that has gone, fill up, drain and go."""
    rng = Random(seed)
    index, replicas = OpenReplicas(CONFIG), []
    for number in range(400):
        chance = rng.random()
        if chance < 0.1 or not replicas:
            free_ids = sorted(set("abcdefg") - {one.id for one in replicas})
            if free_ids:
                replicas.append(Replica(rng.choice(free_ids), SPEC))
                index.changed(replicas[-1])
            continue
        one = rng.choice(replicas)
        if chance < 0.35 and one.load < CONFIG.residents_max:
            add_resident(one, number)
        elif chance < 0.5 and one.residents:
            one.residents.popitem()
        elif chance < 0.65 and len(one.batches) < CONFIG.batches_in_flight_max:
            add_batch(one, number)
        elif chance < 0.8 and one.batches:
            one.batches.popitem()
        elif chance < 0.84:
            one.draining = True
        elif chance < 0.9:
            one.draining = True
            replicas.remove(one)
        index.changed(one)
        index.check_integrity(replicas)
        if rng.random() < 0.3:
            assert (index.open(), index.free()) == searched(replicas)
            index.check_integrity(replicas)


def test_one_that_comes_again_under_its_id_leaves_no_entry_behind() -> None:
    index = OpenReplicas(CONFIG)
    first = Replica("r", SPEC)
    add_resident(first, 1)
    index.changed(first)
    assert index.open() == [(1, "r")]
    first.draining = True
    index.changed(first)
    second = Replica("r", SPEC)
    index.changed(second)
    assert (index.open(), index.free()) == ([(0, "r")], [(0, "r")])


def test_a_look_finds_what_nobody_has_told() -> None:
    index = OpenReplicas(CONFIG)
    replica = Replica("r", SPEC)
    index.changed(replica)
    index.open()
    add_batch(replica, 1)
    index.check_integrity([replica])
    add_batch(replica, 2)
    with pytest.raises(AssertionError, match="nobody said so"):
        index.check_integrity([replica])
    index.changed(replica)
    index.check_integrity([replica])
    with pytest.raises(AssertionError, match="index of open replicas"):
        index.check_integrity([])


def test_a_look_changes_nothing() -> None:
    index = OpenReplicas(CONFIG)
    replica = Replica("r", SPEC)
    index.changed(replica)
    index.check_integrity([replica])
    assert replica.open_key is None
    assert index.open() == [(0, "r")]
