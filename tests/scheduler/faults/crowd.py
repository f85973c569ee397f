"""Rows that step together on one replica, whose batches fail, and that go on in another pool."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.messages import Batch, FailureRecord, Request, Submit
from tests.scheduler.hand import Hand


def crowd(count: int, **config: object) -> Hand:
    """That many rows, filled and stepping on replica r; steps of single tokens."""
    hand = Hand(rows_max=count, draft_len=0, steps_per_batch_max=1, **config)
    hand.join()
    for index in range(count):
        hand.submit(f"q{index}", length=3 + index % 2)
    while [len(batch.rows) for batch in hand.settle()] != [count]:
        hand.work()
    return hand


def play(hand: Hand, breaks: Callable[[Batch], bool], rounds: int = 400) -> list[int]:
    """Answers batches; those that break fail. Their sizes."""
    sizes = []
    for _ in range(rounds):
        batches = [batch for name in hand.replicas() for batch in hand.in_flight(name)]
        if not batches:
            break
        batch = min(batches, key=lambda batch: batch.id)
        if breaks(batch):
            sizes.append(len(batch.rows))
            hand.fail(batch)
        else:
            hand.done(batch)
    return sizes


def move(hand: Hand, to: Hand, new: dict[str, int]) -> None:
    """All live requests go on in another pool; a frontend has their tokens and what it was told.

    `new`: how many new tokens each request wants in all.
    """
    live = [name for name in new if name not in hand.finishes]
    for name in live:
        tokens = tuple(hand.tokens.get(name, ()))
        to.records[name] = hand.records.get(name, FailureRecord())
        to.tokens[name] = list(tokens)
        request = Request(name, (1,) * 3, new[name], committed=tokens)
        to.tell(Submit(request, admitted_before=True, record=to.records[name]))
    to.finishes |= hand.finishes
