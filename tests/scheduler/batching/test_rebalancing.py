"""Proves that residents move to a lighter replica when it is worth their prefill, and only then."""

from __future__ import annotations

import pytest

from scheduler.messages import BatchKind
from tests.scheduler.hand import Hand, rows_of


def loaded(count: int, max_new_tokens: int = 400, length: int = 3, **config: object) -> Hand:
    """That many rows on replica r, none waiting."""
    hand = Hand(rows_max=4, draft_len=0, steps_per_batch_max=1, **config)
    hand.join(kv_blocks=10_000)
    for index in range(count):
        hand.submit(f"q{index}", length=length, max_new_tokens=max_new_tokens)
    while hand.waiting():
        hand.work()
    hand.settle()
    return hand


def test_a_new_replica_gets_work_though_none_waits() -> None:
    hand = loaded(16)
    hand.join("s", kv_blocks=10_000)
    assert not hand.in_flight("s")
    hand.work()
    (batch,) = hand.in_flight("s")
    assert batch.kind is BatchKind.PREFILL
    moved = rows_of(batch)
    assert 4 <= len(moved) <= 8
    assert hand.scheduler.snapshot().moved == len(moved)
    for row in batch.prefill:
        assert len(row.tokens) == 3 + len(hand.tokens.get(row.sequence_id, ()))


@pytest.mark.parametrize(
    ("more", "apart"), [({}, 4), ({"length": 60, "prefill_tokens_max": 32}, 8)]
)
def test_the_imbalance_settles_and_none_goes_back(more: dict[str, int], apart: int) -> None:
    """Also of rows that are longer than a prefill batch."""
    hand = loaded(16, **more)
    hand.join("s", kv_blocks=10_000)
    hand.work(60, "r", "s")
    loads = [hand.replica(name).load for name in "rs"]
    assert max(loads) - min(loads) <= apart
    assert 4 <= hand.scheduler.snapshot().moved <= 8


@pytest.mark.parametrize(
    ("count", "request_of", "kv_blocks"),
    [
        (4, {}, 10_000),  # all fit into one batch
        (16, {"max_new_tokens": 6, "length": 400}, 10_000),  # they are nearly done
        (16, {}, 2),  # the other has no room
    ],
)
def test_none_moves_where_it_gains_nothing(
    count: int, request_of: dict[str, int], kv_blocks: int
) -> None:
    hand = loaded(count, **request_of)
    hand.join("s", kv_blocks=kv_blocks)
    hand.work(3)
    assert hand.scheduler.snapshot().moved == 0
