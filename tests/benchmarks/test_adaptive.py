"""Proves: with a draft that is never right the whole scheduler costs less than 3 % against one that
never drafts: short and long requests, one row and full batches, all at once and Poisson. Where a
verification takes whole tiles of tokens, the draft length comes to fill one.
"""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from benchmarks.adaptive import PROMPT, TILED_FIXED, VirtualReplica, measure
from cluster.local_engine import LocalEngine
from scheduler.config import SchedulerConfig
from scheduler.messages import Request

NEVER_RIGHT = (0.0,)
LEAST = 0.97
TOKENS = 2000
"""New tokens of all requests of a load."""


def load(config: SchedulerConfig, new_tokens: int, per_s: float | None) -> tuple[float, float]:
    """(seconds until the last request ended, mean latency) in virtual time; `per_s` None: all
    requests are there at the start."""
    replica = VirtualReplica(NEVER_RIGHT, timed=True)
    engine = LocalEngine(replica, config, clock=replica.clock)
    draw, due_s, arrivals = Random(3), 0.0, []
    for number in range(max(TOKENS // new_tokens, 24)):
        due_s += draw.expovariate(per_s) if per_s else 0.0
        request = Request(str(number), (1,) * draw.randint(*PROMPT), new_tokens)
        arrivals.append((due_s, request))
    coming, outputs = list(reversed(arrivals)), []
    while coming or engine.advance():
        while coming and coming[-1][0] <= replica.now_s:
            outputs.append(engine.submit(coming.pop()[1]))
        if coming and not engine.advance():
            replica.now_s = max(replica.now_s, coming[-1][0])
    engine.check_finished()
    ended = [output.finished_s or 0.0 for output in outputs]
    waits = [end_s - begin_s for end_s, (begin_s, _) in zip(ended, arrivals, strict=True)]
    return max(ended), fmean(waits)


@pytest.mark.parametrize("busy", [None, 0.5])
@pytest.mark.parametrize("new_tokens", [8, 32, 128])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_draft_that_is_never_right_costs_less_than_three_percent(
    rows: int, new_tokens: int, busy: float | None
) -> None:
    """`busy`: requests come at that share of the rate that the replica could serve."""
    plain = SchedulerConfig(rows_max=rows, draft_len=0)
    per_s = None
    if busy is not None:
        per_s = busy * max(TOKENS // new_tokens, 24) / load(plain, new_tokens, None)[0]
    without_s, without_wait_s = load(plain, new_tokens, per_s)
    chosen_s, chosen_wait_s = load(SchedulerConfig(rows_max=rows), new_tokens, per_s)
    assert without_s / chosen_s >= LEAST
    assert without_wait_s / chosen_wait_s >= LEAST


def test_drafting_in_vain_would_show() -> None:
    plain, drafting = (SchedulerConfig(rows_max=8, draft_len=k) for k in (0, 2))
    assert load(plain, 32, None)[0] / load(drafting, 32, None)[0] < LEAST


@pytest.mark.parametrize(("tile", "acceptance", "rows"), [(32, 0.87, 16), (64, 0.75, 8)])
def test_whole_tiles_are_filled_though_few_draft_lengths_were_tried_at_load(
    tile: int, acceptance: float, rows: int
) -> None:
    """By a straight line through the times all draft tokens cost alike."""
    measured = measure("", (acceptance,), rows, tile, TILED_FIXED)
    best = measured.best_fixed
    assert measured.fixed[best + 1] < 0.85 * measured.fixed[best], "no tile ends there"
    assert measured.chosen > 0.95 * measured.fixed[best]
