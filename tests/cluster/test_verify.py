"""Proves: outputs are compared token for token, a missing end is a difference, and a replica for
the judgement is loaded for a difference only."""

from __future__ import annotations

import pytest

from cluster.verify import Difference, differences
from replicas.config import ReplicaConfig
from scheduler.messages import Request

CONFIG = ReplicaConfig(target="tiny")


@pytest.mark.parametrize(
    ("expected", "got", "found"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 4, 3], (1, 2, 4)),
        ([1, 2, 3], [1, 2], (2, 3, None)),
        ([1, 2], [1, 2, 3], (2, None, 3)),
    ],
)
def test_the_first_place_where_outputs_part(
    expected: list[int], got: list[int], found: tuple[int, int | None, int | None] | None
) -> None:
    same = [7, 8]
    requests = [Request(str(n), (1, 2), 3) for n in range(2)]
    parted = differences([same, expected], [same, got], requests, CONFIG, None)
    assert parted == ([] if found is None else [Difference(1, *found)])


def test_equal_outputs_need_no_replica() -> None:
    def own() -> None:
        raise AssertionError

    assert differences([[1, 2]], [[1, 2]], [Request("a", (1,), 2)], CONFIG, own) == []
