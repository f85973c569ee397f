"""Proves: through lost calls, lost replies, dying replicas and a restarting pool, every request
ends exactly once with the tokens of a perfect world, and nothing stays behind. A broken invariant
ends the pool once, with a last line that names the event and no token; one request that breaks it
fails alone after three times.

Pool actor, workers and session run in one event loop, without Ray.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from typing import Any

import pytest

from cluster.frontend.pool_session import InFlightRequest
from cluster.pool.actor import PoolActor
from cluster.pool.protocol import FRONTEND, WORKER
from cluster.transport import Stream
from scheduler.messages import Action, Event, FinishReason, ReplicaLost, Request, StepDone, Submit
from scheduler.scheduler import Scheduler
from tests.cluster.fakes import Clock, FakeReplica, perfect
from tests.cluster.pool.rig import CONFIG, TIMEOUT_S, Stuck, check, prompts, shards, with_pool
from tests.cluster.wire import Wire, until


@pytest.mark.parametrize(("loss", "seed"), [(0.0, 0), *((0.05, seed) for seed in range(4))])
async def test_lost_calls_and_replies_change_no_token(loss: float, seed: int) -> None:
    async with shards(2, loss=loss, seed=seed) as w:
        requests = [w.submit(prompt, 25) for prompt in prompts(40 if not loss else 12, seed)]
        await check(requests)
        if not loss:
            used = {name for live in requests for name in live.finish.usage.replicas}  # type: ignore[union-attr]
            assert len(used) == 2
            await until(lambda: w.reserved_blocks() == 0)
            await until(lambda: not any(fake.residents for fake in w.fakes))


@pytest.mark.parametrize("lost", ["stream", "lease", "pool"])
async def test_a_session_that_is_given_up_is_ended_and_its_requests_go_on(lost: str) -> None:
    """With its stream or by its lease, while the pool lives on, or with the pool, which begins anew
    with nothing."""
    async with shards(1, step_s=0.01) as w:
        requests = [w.submit(prompt, 120) for prompt in prompts(6)]
        await until(lambda: all(len(live.tokens) > 20 for live in requests))
        if lost == "pool":
            w.wire.restart()
        elif lost == "stream":
            w.wire.break_streams()
        else:
            w.wire.flows.clear()
            await until(lambda: not w.wire.frontends)
        later = [w.submit(prompt, 20) for prompt in prompts(3, seed=1)]
        w.wire.flows.set()
        await check(requests + later)
        for live in requests:
            assert (live.recovered, live.finish.usage.recovered) == (1, 1)
            assert live.finish.usage.completion_tokens == 120
        assert len(w.wire.frontends) == 1
        await until(lambda: not w.fakes[0].residents)


async def test_a_restarted_pool_refuses_nothing_that_was_admitted_before() -> None:
    config = CONFIG.model_copy(
        update={"scheduler": CONFIG.scheduler.model_copy(update={"waiting_requests_max": 2})}
    )
    async with shards(1, config=config, step_s=0.01) as w:
        requests: list[InFlightRequest] = []
        for prompt in prompts(6):
            requests.append(w.submit(prompt, 300))
            await until(lambda: bool(requests[-1].tokens))
        w.workers[0].end()
        w.wire.restart()
        await until(lambda: w.wire.snapshot.waiting == 6)
        await w.add_replica()
        await check(requests)


async def test_what_was_accepted_waits_for_a_replica_that_holds_it_before_its_first_token() -> None:
    async with shards(0) as w:
        stuck = Stuck()
        large = await w.add_replica(fake=stuck)
        await w.until_serving(1)
        live = w.submit([5, 6], 300)
        await until(lambda: live.validated)
        large.end()
        w.wire.restart()
        # By this one alone it would be refused.
        await w.add_replica(kv_blocks=4)
        await until(lambda: bool(w.wire.snapshot.waiting) or live.ended.is_set())
        assert live.reject is None
        assert (live.recovered, live.tokens) == (1, [])
        stuck.let_go.set()
        await w.add_replica()
        await check([live])


async def test_what_no_replica_holds_is_refused_though_the_session_breaks_first() -> None:
    async with shards(0) as w:
        await w.add_replica(kv_blocks=4)
        await w.until_serving(1)
        live = w.submit([5, 6], 300)
        w.wire.restart()
        await w.add_replica(kv_blocks=4)
        await until(live.ended.is_set)
        assert live.reject is not None


async def test_a_pool_that_itself_stood_still_takes_no_peer_for_lost() -> None:
    clock = Clock()
    wire = Wire(CONFIG, clock=clock)
    await wire.join("r", FakeReplica().spec, None)
    await wire.connect(FRONTEND, "f")
    await until(lambda: bool(wire.frontends))
    clock.now_s += 10 * CONFIG.pool.lease_s
    wire.actor.tick()
    assert (wire.replicas, wire.frontends) == (["r"], ["f"])
    # Nor does that make anybody's silence good for ever.
    for _ in range(12):
        clock.now_s += CONFIG.pool.lease_s / 10
        wire.actor.tick()
    assert (wire.replicas, wire.frontends) == ([], [])
    wire.close()


async def test_all_requests_of_a_frontend_end_with_it_though_one_of_them_is_overdue() -> None:
    clock = Clock()
    wire = Wire(CONFIG, clock=clock)
    frontend = await wire.connect(FRONTEND, "f")
    for number in range(9):
        frontend.send(Submit(Request(str(number), (5, 6), 9, timeout_s=1 + (number != 4))))
    await until(lambda: wire.snapshot.live == 9)
    clock.now_s += 1.5
    wire.break_streams()
    await until(lambda: not wire.frontends)
    assert wire.snapshot.live == 0
    wire.close()


@pytest.mark.parametrize(
    ("lost", "lives", "by_batch"),
    [
        pytest.param("stream", False, True, id="dead"),
        pytest.param("stream", True, False, id="only the stream is lost"),
        pytest.param("silent", True, True, id="stuck"),
        pytest.param("never came", True, False, id="without a stream it has begun no batch"),
    ],
)
async def test_a_loss_counts_against_requests_if_the_process_is_dead_or_stuck(
    lost: str, lives: bool, by_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probe(_process: object) -> bool:
        return lives

    clock, losses = Clock(), []
    wire = Wire(CONFIG, clock=clock, probe=probe)
    step = wire.actor.scheduler.step

    def noted(event: Event, now_s: float) -> list[Action]:
        losses.extend([event] if isinstance(event, ReplicaLost) else [])
        return step(event, now_s)

    monkeypatch.setattr(wire.actor.scheduler, "step", noted)
    await wire.join("r", FakeReplica().spec, None)
    if lost != "never came":
        await wire.connect(WORKER, "r")
        await until(lambda: wire.serves("r"))
    if lost == "stream":
        wire.break_streams()
    else:
        for _ in range(12):
            clock.now_s += CONFIG.pool.lease_s / 10
            wire.actor.tick()
    await until(lambda: not wire.replicas)
    assert losses == [ReplicaLost("r", by_batch)]
    wire.close()


async def test_a_long_batch_keeps_its_lease() -> None:
    async with shards(1, step_s=0.8) as w:
        requests = [w.submit(prompt, 1) for prompt in prompts(4)]
        await check(requests)
        assert all(live.finish.usage.recovered == 0 for live in requests)  # type: ignore[union-attr]


async def test_a_session_that_is_closed_has_ended_in_the_pool_too() -> None:
    async with shards(1, step_s=0.01) as w:
        w.submit([3, 4], 400)
        await until(lambda: w.reserved_blocks() > 0)
        await w.session.close()
        await until(lambda: w.reserved_blocks() == 0)
        assert (w.live(), w.wire.frontends) == ([0], [])


async def test_a_pool_that_only_says_it_lives_is_asked_with_pauses_and_deadlines_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.frontend.pool_session.session._OVERDUE_S", 0.1)
    async with shards(0) as w:
        w.wire.half_dead = True
        w.wire.break_streams()
        live = w.submit([5, 6], 10, timeout_s=0.2)
        await live.ended.wait()
        assert live.finish.reason is FinishReason.DEADLINE
        assert len(w.wire.streams) < 100, "asked again with pauses"
        await until(lambda: len(w.wire.streams) > 2)
        w.session.check()
        # Once it answers again, all is well.
        w.wire.half_dead = False
        await w.add_replica()
        later = w.submit([5, 6], 10)
        await check([later])


@pytest.mark.parametrize("lives", [False, True])
async def test_a_pool_that_answers_nothing_ends_requests_as_unreachable(lives: bool) -> None:
    async with shards(0, config=with_pool(CONFIG, unreachable_s=0.3)) as w:
        w.wire.half_dead = lives
        w.wire.loss = 0.0 if lives else 1.0
        w.wire.break_streams()
        live = w.submit([5, 6], 10)
        await live.ended.wait()
        assert live.cut


async def test_no_wait_goes_beyond_the_silence_that_a_pool_may_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a stream stands, and while the next connection is awaited."""
    monkeypatch.setattr("cluster.frontend.pool_session.session._SILENT_S", math.inf)
    clock = Clock()
    config = with_pool(CONFIG, unreachable_s=TIMEOUT_S / 2)
    async with shards(1, config=config, step_s=0.01, frontend_clock=clock) as w:
        live = w.submit([5, 6], 100)
        await until(lambda: bool(live.tokens))
        w.wire.flows.clear()
        clock.now_s += config.pool.unreachable_s
        await live.ended.wait()
        assert live.cut
        assert [kind for kind, _ in w.wire.streams].count(FRONTEND) == 1, "the session stands yet"

        answers = asyncio.Event()
        connect = w.wire.connect

        async def late(*args: Any) -> Stream:
            await answers.wait()
            return await connect(*args)

        monkeypatch.setattr(w.wire, "connect", late)
        w.wire.break_streams()
        w.wire.flows.set()
        waiting = w.submit([5, 6], 10)
        await waiting.ended.wait()
        assert waiting.cut
        answers.set()
        await w.until_serving(1)
        await check([w.submit([5, 6], 10)])


async def test_an_idle_pool_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.pool.actor._IDLE_EXIT_S", 0.05)
    left: list[bool] = []
    actor = PoolActor(CONFIG, leave=lambda: left.append(True))
    await actor.status()
    async with asyncio.timeout(100):
        while not left:
            await asyncio.sleep(0.01)


# --------------------------------------------------------------------------- a broken invariant

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
        # All of it is known, so that no token stands in it; paths and ids may have any number.
        where, _, requests = line.partition(f" in {kind.__name__} of ")
        place = re.escape(planted.__code__.co_filename)
        told = r"the pool ends and is started anew: AssertionError at "
        assert re.fullmatch(rf"{told}{place}:\d+", where)
        assert re.fullmatch(r"(frontend\.\w+-\d+(, |$))+", requests)
        assert name in requests.split(", ")
