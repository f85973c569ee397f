"""Proves: a broken invariant ends the pool once, with a last line that names the event and no
token; one request that breaks it fails alone after three times, and all others finish right.

Pool, worker and session run in one event loop, without Ray.
"""

from __future__ import annotations

import logging

import pytest

from scheduler.messages import Event, FinishReason, StepDone, Submit
from scheduler.scheduler import Scheduler
from tests.cluster.fakes import perfect
from tests.cluster.pool.rig import prompts, shards

POISON = 313


def breaks_at_its_submit(event: Event, _live: list[str]) -> bool:
    return isinstance(event, Submit) and POISON in event.request.prompt


def breaks_at_its_results(event: Event, live: list[str]) -> bool:
    return isinstance(event, StepDone) and any(
        row.sequence_id in live and row.tokens for row in event.result.rows
    )


@pytest.mark.parametrize(
    ("breaks", "kind"), [(breaks_at_its_submit, Submit), (breaks_at_its_results, StepDone)]
)
async def test_a_request_that_ends_the_pool_fails_alone_after_three_times(
    breaks: object, kind: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = Scheduler.step
    poisoned: list[str] = []

    def planted(self: Scheduler, event: Event, now_s: float) -> object:
        if isinstance(event, Submit) and POISON in event.request.prompt:
            poisoned.append(event.request.id)
        assert not breaks(event, poisoned), f"tokens {POISON}"  # type: ignore[operator]
        return step(self, event, now_s)

    monkeypatch.setattr(Scheduler, "step", planted)
    caplog.set_level(logging.CRITICAL, "lockstep.pool")
    ends = 0

    def abort() -> None:
        nonlocal ends
        ends += 1
        made.wire.restart()

    async with shards(2, abort=abort) as made:
        asked = prompts(8)
        lives = [made.submit(prompt, 40) for prompt in asked]
        guilty = made.submit([5, POISON, 6], 40)
        for live in (*lives, guilty):
            await live.ended.wait()
        assert guilty.finish.reason is FinishReason.FAILED
        for prompt, live in zip(asked, lives, strict=True):
            assert live.tokens == perfect(prompt, 40)
        assert ends == 3
    last = [record.getMessage() for record in caplog.records]
    assert len(last) == 3
    for line, name in zip(last, poisoned, strict=False):
        assert f" in {kind.__name__} of {name}" in line
        assert str(POISON) not in line.replace(name, "")
