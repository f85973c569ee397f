"""A request goes where it is served first, and nothing is lost from sight by being divided."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from random import Random

import pytest

from scheduler.messages import FinishReason
from scheduler.scaling import ShardLoad, choose_shard, merged_status, shard_of_rank
from scheduler.status import PoolStatus


@pytest.mark.parametrize(
    ("loads", "tokens", "chosen"),
    [
        ([ShardLoad(1, 0)], 5, 0),
        ([ShardLoad(1, 100), ShardLoad(1, 99)], 5, 1),
        # 4 replicas are done with 300 tokens before 1 is with 100.
        ([ShardLoad(1, 100), ShardLoad(4, 300)], 5, 1),
        # A long request takes longer on one empty replica than on four with a little work.
        ([ShardLoad(1, 0), ShardLoad(4, 100)], 33, 0),
        ([ShardLoad(1, 0), ShardLoad(4, 100)], 34, 1),
        ([ShardLoad(0, 0), ShardLoad(1, 10_000)], 5, 1),
        ([ShardLoad(1, 0, answers=False), ShardLoad(1, 10_000)], 5, 1),
        # A shard that answers, but has no replica yet, can at least keep the request.
        ([ShardLoad(1, 0, answers=False), ShardLoad(0, 10)], 5, 1),
        ([ShardLoad(0, 20), ShardLoad(0, 10)], 5, 1),
        ([ShardLoad(2, 0, answers=False), ShardLoad(1, 0, answers=False)], 5, 0),
        # Requests that end early leave room.
        ([ShardLoad(1, 60, expected_share=0.1), ShardLoad(4, 0)], 1000, 0),
        # One that can hold it comes before one that is idle, and one that serves before none.
        ([ShardLoad(9, 0, length_max=99), ShardLoad(1, 900, length_max=100)], 5, 1),
        ([ShardLoad(9, 0, length_max=99), ShardLoad(0, 0, length_max=0)], 5, 0),
        ([ShardLoad(1, 0, length_max=99), ShardLoad(2, 0, length_max=9)], 5, 1),
        ([ShardLoad(1, 9, length_max=9), ShardLoad(1, 0, False, length_max=200)], 5, 0),
    ],
)
def test_the_shard_that_is_done_first_is_chosen(
    loads: list[ShardLoad], tokens: int, chosen: int
) -> None:
    assert choose_shard(loads, tokens, 0, 100) == chosen


def test_among_equals_each_has_its_turn() -> None:
    equals = [ShardLoad(1, 7)] * 4
    assert [choose_shard(equals, 5, turn, 9) for turn in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_choosing_keeps_shards_of_unlike_size_equally_far_behind() -> None:
    rng = Random(7)
    serving, outstanding = (1, 2, 4), [0, 0, 0]
    longest = 500
    for turn in range(2000):
        tokens = rng.randint(1, longest)
        loads = [ShardLoad(*each) for each in zip(serving, outstanding, strict=True)]
        outstanding[choose_shard(loads, tokens, turn, 9)] += tokens
        per_replica = [tokens / n for tokens, n in zip(outstanding, serving, strict=True)]
        assert max(per_replica) - min(per_replica) <= longest


@pytest.mark.parametrize("shards", [1, 2, 4, 7])
@pytest.mark.parametrize("replicas", [0, 1, 4, 9, 64])
def test_shards_differ_by_at_most_one_replica(shards: int, replicas: int) -> None:
    held = Counter(dict.fromkeys(range(shards), 0))
    held.update(shard_of_rank(rank, shards) for rank in range(replicas))
    assert set(held) == set(range(shards)), "no other shard"
    assert max(held.values()) - min(held.values()) <= 1


def _status(number: int) -> PoolStatus:
    """One whose every figure is made of `number`, whatever figures there are."""
    own = {"replicas": (f"r{number}",), "finished": dict.fromkeys(FinishReason, number)}
    return PoolStatus(
        **{field.name: own.get(field.name, number) for field in fields(PoolStatus)}  # type: ignore[arg-type]
    )


def test_merged_figures_are_sums() -> None:
    merged = merged_status([_status(1), _status(10), _status(100)])
    for field in fields(PoolStatus):
        value = getattr(merged, field.name)
        if field.name == "replicas":
            assert value == ("r1", "r10", "r100")
        elif field.name == "finished":
            assert value == dict.fromkeys(FinishReason, 111)
        else:
            assert value == 111, field.name
