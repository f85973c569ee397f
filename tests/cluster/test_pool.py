"""Proves: through lost calls, lost replies, dying replicas and a restarting pool, every request
ends exactly once with the tokens of a perfect world, and nothing stays behind.

Pool actor, replica runners and pool link run in one event loop, without Ray.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import ClusterConfig, from_args
from cluster.frontend.in_flight import InFlightRequest
from cluster.pool.ack_queue import AckQueue
from cluster.pool.actor import PoolActor
from cluster.pool.peers import ReplicaPeer
from cluster.pool.protocol import PoolUnreachable, ReleaseNote
from cluster.pool.session import PoolSession
from cluster.worker.worker import ReplicaUnhealthy, Worker
from scheduler.messages import BatchKind, FinishReason, RejectCode, Request, Submit
from tests.cluster.fakes import FakeReplica, perfect

CONFIG = from_args(
    {
        "scheduler": {"rows_max": 4},
        "pool": {"lease_s": 0.5, "poll_s": 0.1, "tick_s": 0.01, "gather_ms": 2, "probe_s": 0.02},
        "actors": {"drain_s": 20},
    }
)
TIMEOUT_S = 60.0


class Wire:
    """A PoolPort that loses calls and replies at random, and whose pool can be replaced."""

    def __init__(self, config: ClusterConfig, loss: float = 0.0, seed: int = 0, **options: Any):
        self._make: Callable[[], PoolActor] = lambda: PoolActor(config, **options)
        self.loss = loss
        self._draw = random.Random(seed)
        self.submits_late = False
        self.updates_flow = asyncio.Event()
        """While it is not set, polls for updates are held up on their way."""
        self.updates_flow.set()
        self.calls: Counter[str] = Counter()
        self.actor = self._make()

    def restart(self) -> None:
        if self.actor._ticker is not None:
            self.actor._ticker.cancel()
        self.actor = self._make()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            actor = self.actor
            self.calls[method] += 1
            if self._draw.random() < self.loss:
                raise PoolUnreachable("the call was lost")
            if self.submits_late and method == "submit":
                await asyncio.sleep(0.02)
            if method == "updates":
                await self.updates_flow.wait()
            reply = await getattr(actor, method)(*args)
            if actor is not self.actor:
                raise PoolUnreachable("the pool has died")
            if self._draw.random() < self.loss:
                raise PoolUnreachable("the reply was lost")
            return reply

        return call


class World:
    """One pool, its replicas and one frontend's link."""

    def __init__(self, wire: Wire, config: ClusterConfig) -> None:
        self.wire = wire
        self.config = config
        self.link = PoolSession(wire, "frontend", config.pool.poll_s, unreachable_s=1000.0)
        self.runners: list[Worker] = []
        self.fakes: list[FakeReplica] = []

    async def add_replica(self, step_s: float = 0.002, **options: Any) -> Worker:
        fake = FakeReplica(step_s, **options)
        name = f"replica{len(self.runners)}"
        runner = Worker(self.config, lambda: fake, [self.wire], name, process=fake)
        await runner.start()
        self.fakes.append(fake)
        self.runners.append(runner)
        return runner

    def submit(self, prompt: list[int], count: int, **options: Any) -> InFlightRequest:
        timeout_s = options.pop("timeout_s", TIMEOUT_S)
        return self.link.submit(Request("x", tuple(prompt), count, **options), timeout_s)

    async def until(self, condition: Callable[[], bool], bound_s: float = 100.0) -> None:
        async with asyncio.timeout(bound_s):
            while not condition():
                await asyncio.sleep(0.01)

    def reserved_blocks(self) -> int:
        replicas = self.wire.actor._scheduler.snapshot().replicas
        return sum(replica.kv_blocks_used for replica in replicas)


@asynccontextmanager
async def world(
    loss: float = 0.0, seed: int = 0, config: ClusterConfig = CONFIG, **options: Any
) -> AsyncIterator[World]:
    made = World(Wire(config, loss, seed, **options), config)
    made.link.start()
    try:
        async with asyncio.timeout(100):
            yield made
    finally:
        made.wire.loss = 0.0
        await made.link.close()
        for runner in made.runners:
            runner._puller.cancel()
            runner._jobs.put(_stop())
        if made.wire.actor._ticker is not None:
            made.wire.actor._ticker.cancel()


def _stop() -> Any:
    from cluster.worker.worker import _Stop

    return _Stop()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, 90) for _ in range(draw.randint(1, 30))] for _ in range(count)]


async def finish(requests: list[InFlightRequest]) -> None:
    await asyncio.gather(*(live.ended.wait() for live in requests))


def assert_perfect(requests: list[InFlightRequest]) -> None:
    for live in requests:
        assert live.finish is not None
        assert live.finish.reason is FinishReason.LENGTH
        assert live.tokens == perfect(live.request.prompt, live.request.max_new_tokens)


def test_many_requests_on_two_replicas() -> None:
    async def test() -> None:
        async with world() as w:
            await w.add_replica()
            await w.add_replica()
            requests = [w.submit(prompt, 20) for prompt in prompts(40)]
            await finish(requests)
            assert_perfect(requests)
            used = {name for live in requests for name in live.finish.usage.replicas}  # type: ignore[union-attr]
            assert len(used) == 2
            await w.until(lambda: w.reserved_blocks() == 0)
            await w.until(lambda: not any(fake.residents for fake in w.fakes))
            w.wire.actor._scheduler.check_integrity()

    asyncio.run(test())


def test_requests_wait_for_the_first_replica() -> None:
    async def test() -> None:
        async with world() as w:
            live = w.submit([5, 6], 5)
            await asyncio.sleep(0.2)
            await w.add_replica()
            await finish([live])
            assert_perfect([live])

    asyncio.run(test())


@pytest.mark.parametrize("seed", range(4))
def test_lost_calls_and_replies_change_no_token(seed: int) -> None:
    async def test() -> None:
        async with world(loss=0.05, seed=seed) as w:
            await w.add_replica()
            await w.add_replica()
            requests = [w.submit(prompt, 25) for prompt in prompts(12, seed)]
            await finish(requests)
            assert_perfect(requests)

    asyncio.run(test())


def test_a_restarted_pool_is_told_everything_again() -> None:
    async def test() -> None:
        async with world() as w:
            await w.add_replica(step_s=0.01)
            requests = [w.submit(prompt, 200) for prompt in prompts(6)]
            for _ in range(2):
                await w.until(lambda: all(len(live.tokens) > 5 for live in requests))
                w.wire.restart()
            await finish(requests)
            assert_perfect(requests)
            assert all(live.finish.usage.recovered >= 1 for live in requests)  # type: ignore[union-attr]
            await w.until(lambda: not w.fakes[0].residents)

    asyncio.run(test())


@pytest.mark.parametrize("lost", ["call", "lease"])
def test_a_session_that_is_given_up_is_ended_and_its_figures_are_told(lost: str) -> None:
    """The pool lives on; only the session is over, by a call that got lost or by its lease."""

    async def test() -> None:
        async with world() as w:
            await w.add_replica(step_s=0.01)
            requests = [w.submit(prompt, 120) for prompt in prompts(6)]
            await w.until(lambda: all(len(live.tokens) > 20 for live in requests))
            if lost == "call":
                await w.link._start_over(w.link._session, "a call was lost")
            else:
                w.wire.actor._lose_frontend(w.link._session, "is silent")
            await finish(requests)
            assert_perfect(requests)
            for live in requests:
                assert live.finish is not None
                usage = live.finish.usage
                # Each step commits what it accepts and one token, in whichever session.
                assert usage.steps + usage.accepted_tokens >= 120
                assert usage.recovered == 1
                assert usage.completion_tokens == 120
            assert len(w.wire.actor._frontends) == 1

    asyncio.run(test())


def test_a_start_over_can_be_cancelled_at_every_moment() -> None:
    """Also at the one in which what it waits for is there: else the link never ends."""

    async def outlived(w: World, rounds: int) -> bool:
        """Whether it was still under way after so many rounds of the event loop."""
        w.link._fruitless = 0  # else it pauses first
        task = asyncio.create_task(w.link._start_over(w.link._session, "a test"))
        for _ in range(rounds):
            await asyncio.sleep(0)
        if task.done():
            return False
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled(), rounds
        assert w.link._steady.is_set()
        return True

    async def test() -> None:
        async with world() as w:
            answer = w.wire.part

            async def part(session: str) -> Any:
                await asyncio.sleep(0)
                reply = await answer(session)
                await asyncio.sleep(0)
                return reply

            w.wire.part = part  # type: ignore[attr-defined]
            rounds = 0
            while await outlived(w, rounds):
                rounds += 1
            assert rounds > 2, "there was a moment in which it waited for the pool"

    asyncio.run(test())


def test_a_closed_link_has_ended() -> None:
    async def test() -> None:
        async with world() as w:
            w.submit([5, 6], 5)
            await w.until(lambda: w.link._registered)
            await w.link.close()
            assert all(task.done() for task in w.link._tasks)
            assert not w.wire.actor._frontends

    asyncio.run(test())


def test_a_restarted_pool_refuses_nothing_that_was_accepted_before() -> None:
    config = CONFIG.model_copy(
        update={"scheduler": CONFIG.scheduler.model_copy(update={"waiting_requests_max": 2})}
    )

    async def test() -> None:
        async with world(config=config) as w:
            first = await w.add_replica(step_s=0.01)
            requests: list[InFlightRequest] = []
            for prompt in prompts(6):
                requests.append(w.submit(prompt, 300))
                await w.until(lambda: bool(requests[-1].tokens))
            first._puller.cancel()
            w.wire.restart()
            await w.until(lambda: w.wire.actor._scheduler.snapshot().waiting == 6)
            await w.add_replica()
            await finish(requests)
            assert_perfect(requests)

    asyncio.run(test())


def test_what_was_accepted_waits_for_a_replica_that_holds_it_even_before_its_first_token() -> None:
    async def test() -> None:
        async with world() as w:
            large = await w.add_replica(prefill_s=2.0)
            live = w.submit([5, 6], 300)
            await w.until(lambda: live.checked)
            large._puller.cancel()
            w.wire.restart()
            # By this one alone it would be refused.
            await w.add_replica(kv_blocks=4)
            pool = w.wire.actor._scheduler
            await w.until(lambda: bool(pool.snapshot().waiting) or live.ended.is_set())
            assert live.reject is None
            assert (live.recovered, live.tokens) == (1, [])
            await w.add_replica()
            await finish([live])
            assert_perfect([live])

    asyncio.run(test())


def test_polls_that_overtake_submits_start_nothing_over() -> None:
    async def test() -> None:
        async with world() as w:
            w.wire.submits_late = True
            await w.add_replica(step_s=0.01)
            requests = [w.submit(prompt, 200) for prompt in prompts(6)]
            await w.until(lambda: all(len(live.tokens) > 5 for live in requests))
            assert all(live.recovered == 0 for live in requests)
            w.wire.restart()
            await finish(requests)
            assert_perfect(requests)
            assert {live.recovered for live in requests} == {1}

    asyncio.run(test())


def note_submits(wire: Wire) -> list[list[Submit]]:
    """The requests of each call from now on."""
    calls: list[list[Submit]] = []

    async def submit(session: str, submits: list[Submit], *rest: Any) -> Any:
        calls.append(submits)
        return await wire.actor.submit(session, submits, *rest)

    wire.submit = submit  # type: ignore[attr-defined]
    return calls


def test_what_a_restarted_pool_is_told_comes_in_calls_that_it_can_answer_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.pool.session._CALL_TOKENS_MAX", 100)
    monkeypatch.setattr("cluster.pool.session._CALL_REQUESTS_MAX", 4)

    async def test() -> None:
        async with world() as w:
            await w.add_replica()
            requests = [w.submit(prompt, 60) for prompt in [*prompts(40), list(range(2, 202))]]
            await w.until(lambda: any(len(live.tokens) > 5 for live in requests))
            calls = note_submits(w.wire)
            w.wire.restart()
            await finish(requests)
            assert_perfect(requests)
            assert sum(map(len, calls)) > 8
            for call in calls:
                tokens = sum(len(one.request.prompt + one.request.committed) for one in call)
                assert len(call) <= 4
                assert tokens <= 100 or len(call) == 1

    asyncio.run(test())


def test_a_request_cancelled_before_its_call_went_out_never_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.pool.session._CALL_REQUESTS_MAX", 1)

    async def test() -> None:
        async with world() as w:
            await w.add_replica()
            requests = [w.submit(prompt, 60) for prompt in prompts(3)]
            w.link.cancel(requests[2])
            await finish(requests)
            assert_perfect(requests[:2])
            assert requests[2].finish is not None
            assert requests[2].finish.reason is FinishReason.CANCELLED
            assert requests[2].tokens == []

    asyncio.run(test())


def test_a_pool_that_itself_stood_still_takes_nobody_for_lost() -> None:
    async def test() -> None:
        now_s = 0.0
        actor = PoolActor(CONFIG, clock=lambda: now_s)
        await actor.join("r", FakeReplica().spec, None)
        await actor.submit("i", [], [])
        now_s += 10 * CONFIG.pool.lease_s
        actor.tick()
        assert (set(actor._replicas), set(actor._frontends)) == ({"r"}, {"i"})
        # Nor does that make anybody's silence good for ever.
        for _ in range(12):
            now_s += CONFIG.pool.lease_s / 10
            actor.tick()
        assert (set(actor._replicas), set(actor._frontends)) == (set(), set())
        assert actor._ticker is not None
        actor._ticker.cancel()

    asyncio.run(test())


def test_a_lost_frontend_learns_it_from_its_next_submit() -> None:
    async def test() -> None:
        async with world() as w:
            await w.add_replica(step_s=0.01)
            first = [w.submit(prompt, 200) for prompt in prompts(3)]
            await w.until(lambda: all(len(live.tokens) > 5 for live in first))
            w.wire.updates_flow.clear()
            await w.until(lambda: not w.wire.actor._frontends)
            w.wire.updates_flow.set()
            second = [w.submit(prompt, 20) for prompt in prompts(3, seed=1)]
            await finish(first + second)
            assert_perfect(first + second)
            assert {live.recovered for live in first} == {1}
            assert {live.recovered for live in second} == {0}

    asyncio.run(test())


def test_an_idle_frontend_that_was_lost_learns_it_from_its_next_poll() -> None:
    async def test() -> None:
        async with world() as w:
            await w.until(lambda: bool(w.wire.actor._frontends))
            w.wire.updates_flow.clear()
            await w.until(lambda: not w.wire.actor._frontends)
            w.wire.updates_flow.set()
            lost = w.link._session
            await w.until(lambda: w.link._session != lost)
            await w.until(lambda: set(w.wire.actor._frontends) == {w.link._session})

    asyncio.run(test())


def test_an_ended_session_is_refused_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.pool.actor._ENDED_MAX", 2)

    async def test() -> None:
        actor = PoolActor(CONFIG)
        await actor.submit("a", [Submit(Request("a-1", (1,), 5))], [])
        await actor.part("a")
        assert not (await actor.submit("a", [Submit(Request("a-2", (1,), 5))], [])).known
        assert not (await actor.updates("a", 1, 0.0)).known
        assert not actor._owners
        for name in "bc":
            await actor.part(name)
        assert (await actor.submit("a", [], [])).known

    asyncio.run(test())


def test_a_silent_replica_loses_its_residents_to_another() -> None:
    async def test() -> None:
        async with world() as w:
            dying = await w.add_replica(step_s=0.01)
            requests = [w.submit(prompt, 60) for prompt in prompts(3)]
            await w.until(lambda: all(len(live.tokens) > 5 for live in requests))
            dying._puller.cancel()
            await w.add_replica()
            await finish(requests)
            assert_perfect(requests)
            assert all(live.finish.usage.recovered == 1 for live in requests)  # type: ignore[union-attr]

    asyncio.run(test())


def test_a_batch_takes_one_pull_where_no_other_can_be_given_meanwhile() -> None:
    settings = {"pool": {"lease_s": 30, "poll_s": 10}, "scheduler": {"steps_per_batch_max": 1}}

    async def test() -> None:
        async with world(config=from_args(settings)) as w:
            await w.add_replica()
            requests = [w.submit(prompt, 60, draft_len=0) for prompt in prompts(1)]
            await finish(requests)
            assert_perfect(requests)
            # The prefill, and a step for each token; the first poll came before there was any.
            assert 61 <= w.wire.calls["pull"] <= 64

    asyncio.run(test())


def test_a_dead_process_is_noticed_before_its_lease_ends() -> None:
    dead: list[FakeReplica] = []

    async def lives(process: FakeReplica) -> bool:
        return process not in dead

    # Longer than the test may take.
    pool = CONFIG.pool.model_copy(update={"lease_s": 1000.0})

    async def test() -> None:
        async with world(config=CONFIG.model_copy(update={"pool": pool}), probe=lives) as w:
            runner = await w.add_replica()
            dead.append(w.fakes[0])
            await w.until(lambda: runner.replica_id not in w.wire.actor._replicas)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("lost", "quiet", "asks_per_s"),
    [
        pytest.param(None, False, 2, id="no connection"),
        pytest.param(False, False, 0, id="a connection"),
        pytest.param(False, True, 2, id="a connection, and silence"),
        pytest.param(True, False, 10, id="the connection has ended"),
    ],
)
def test_ray_is_asked_for_a_process_whose_connection_does_not_say_that_it_lives(
    lost: bool | None, quiet: bool, asks_per_s: int
) -> None:
    async def test() -> None:
        asked = 0

        async def lives(_process: object) -> bool:
            nonlocal asked
            asked += 1
            return True

        connection = None if lost is None else SimpleNamespace(lost=lost)
        peer = ReplicaPeer(FakeReplica().spec, object(), 0.0, AckQueue(), stream=connection)
        for tick in range(1, 1001):
            assert not peer.is_dead(lives, 10 + tick / 100, 0.5, quiet)
            await asyncio.sleep(0)
        # A question is answered before the next tick, and begins with one.
        assert asks_per_s * 9 <= asked <= asks_per_s * 10

    asyncio.run(test())


def test_a_process_whose_connection_has_ended_is_asked_for_at_once() -> None:
    async def test() -> None:
        async def dead(_process: object) -> bool:
            return False

        connection = SimpleNamespace(lost=False)
        peer = ReplicaPeer(FakeReplica().spec, object(), 0.0, AckQueue(), stream=connection)
        assert not peer.is_dead(dead, 10.0, 0.5, quiet=False)
        connection.lost = True
        assert not peer.is_dead(dead, 10.05, 0.5, quiet=False)
        await asyncio.sleep(0)
        assert peer.is_dead(dead, 10.1, 0.5, quiet=False)

    asyncio.run(test())


def test_a_long_batch_keeps_its_lease() -> None:
    async def test() -> None:
        async with world() as w:
            await w.add_replica(step_s=0.8)
            requests = [w.submit(prompt, 2) for prompt in prompts(6)]
            await finish(requests)
            assert_perfect(requests)
            assert all(live.finish.usage.recovered == 0 for live in requests)  # type: ignore[union-attr]

    asyncio.run(test())


def test_a_draining_replica_hands_its_residents_over() -> None:
    async def test() -> None:
        async with world() as w:
            going = await w.add_replica(step_s=0.01)
            requests = [w.submit(prompt, 60) for prompt in prompts(6)]
            await w.until(lambda: all(live.tokens for live in requests))
            await w.add_replica()
            await going.close()
            assert going.replica_id not in w.wire.actor._replicas
            await asyncio.to_thread(going._thread.join, 5)
            assert not going._thread.is_alive()
            await finish(requests)
            assert_perfect(requests)

    asyncio.run(test())


def test_a_cancelled_request_frees_its_blocks() -> None:
    async def test() -> None:
        async with world() as w:
            await w.add_replica(step_s=0.01)
            requests = [w.submit(prompt, 200) for prompt in prompts(5)]
            await w.until(lambda: all(live.tokens for live in requests))
            for live in requests:
                w.link.cancel(live)
                w.link.cancel(live)
            await finish(requests)
            assert {live.finish.reason for live in requests if live.finish} == {
                FinishReason.CANCELLED
            }
            await w.until(lambda: w.reserved_blocks() == 0)

    asyncio.run(test())


def test_a_request_cancelled_before_it_was_sent_never_runs() -> None:
    async def test() -> None:
        async with world() as w:
            await w.add_replica()
            live = w.submit([4], 200)
            w.link.cancel(live)
            await finish([live])
            assert live.finish is not None
            assert live.finish.reason is FinishReason.CANCELLED

    asyncio.run(test())


def test_an_frontend_that_no_longer_polls_loses_its_requests() -> None:
    async def test() -> None:
        async with world() as w:
            await w.add_replica(step_s=0.01)
            w.submit([3, 4], 400)
            await w.until(lambda: w.reserved_blocks() > 0)
            for task in w.link._tasks:
                task.cancel()
            await w.until(lambda: w.reserved_blocks() == 0)
            assert not w.wire.actor._owners

    asyncio.run(test())


def test_a_deadline_ends_a_request_with_its_tokens_so_far() -> None:
    ahead_s = 0.0

    async def test() -> None:
        nonlocal ahead_s
        async with world(clock=lambda: time.monotonic() + ahead_s) as w:
            await w.add_replica(step_s=0.02)
            live = w.submit([3, 4], 400, timeout_s=100.0)
            await w.until(lambda: bool(live.tokens))
            ahead_s = 101.0
            await finish([live])
            assert live.finish is not None
            assert live.finish.reason is FinishReason.DEADLINE
            assert live.tokens
            assert live.tokens == perfect([3, 4], len(live.tokens))

    asyncio.run(test())


def test_a_pool_that_never_answers_ends_requests_as_unreachable() -> None:
    async def test() -> None:
        async with world(loss=1.0) as w:
            w.link._unreachable_s = 0.2
            live = w.submit([3], 5)
            await finish([live])
            assert live.unreachable

    asyncio.run(test())


def half_dead(wire: Wire) -> Callable[[], int]:
    """From now on the pool says that it lives, and answers nothing else; returns a count of calls.

    Its calls fail at once, so whoever only repeats them lets nobody else run.
    """
    calls = 0

    async def fail(*_args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 500:
            raise RuntimeError("called again and again without a pause")
        raise PoolUnreachable("the line is lost")

    wire.submit = wire.updates = fail  # type: ignore[attr-defined]
    return lambda: calls


def test_a_pool_that_only_says_it_lives_is_asked_with_pauses_and_deadlines_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.pool.session._OVERDUE_S", 0.1)

    async def test() -> None:
        async with world() as w:
            calls = half_dead(w.wire)
            live = w.submit([5, 6], 10, timeout_s=0.2)
            await live.ended.wait()
            assert live.finish is not None
            assert live.finish.reason is FinishReason.DEADLINE
            assert calls() > 1
            w.link.check()
            # Once it answers again, all is well.
            del w.wire.submit, w.wire.updates
            await w.add_replica()
            later = w.submit([5, 6], 10)
            await finish([later])
            assert_perfect([later])

    asyncio.run(test())


def test_a_pool_that_only_says_it_lives_ends_requests_as_unreachable() -> None:
    async def test() -> None:
        async with world() as w:
            w.link._unreachable_s = 0.3
            half_dead(w.wire)
            live = w.submit([5, 6], 10)
            await live.ended.wait()
            assert live.unreachable

    asyncio.run(test())


def test_a_refused_request_says_why() -> None:
    async def test() -> None:
        async with world() as w:
            await w.add_replica()
            await w.until(lambda: bool(w.wire.actor._replicas))
            live = w.submit([100_000], 5)
            await finish([live])
            assert live.reject is not None
            assert (live.reject.code, live.reject.field) == (RejectCode.INVALID, "prompt")

    asyncio.run(test())


def test_committed_tokens_of_a_client_are_not_generated_again() -> None:
    async def test() -> None:
        async with world() as w:
            await w.add_replica()
            whole = perfect([7, 8], 30)
            live = w.submit([7, 8], 30, committed=tuple(whole[:12]))
            await finish([live])
            assert live.tokens == whole

    asyncio.run(test())


class Broken(FakeReplica):
    """Raises on the batches whose numbers are in `bad`."""

    bad: range = range(0)
    bad_kinds: tuple[BatchKind, ...] = tuple(BatchKind)

    def step(self, batch: Any, *rest: Any) -> Any:
        if batch.id in self.bad and batch.kind in self.bad_kinds:
            raise MemoryError("too much")
        return super().step(batch, *rest)


def test_a_result_that_cannot_be_sent_is_a_failed_batch() -> None:
    async def test() -> None:
        async with world() as w:
            await w.add_replica()
            step, spoiled = w.fakes[0].step, []

            def spoil(batch: Any, interrupted: Callable[[], bool]) -> Any:
                result = step(batch, interrupted)
                if batch.kind is BatchKind.PREFILL and not spoiled:
                    spoiled.append(batch.id)
                    w.fakes[0].release(row.sequence_id for row in batch.prefill)
                    (row, *_) = result.rows
                    return replace(result, rows=(replace(row, extras=(object(),)),))
                return result

            w.fakes[0].step = spoil  # type: ignore[method-assign]
            live = w.submit([5, 6, 7], 20)
            await live.ended.wait()
            assert live.tokens == perfect([5, 6, 7], 20)
            assert spoiled

    asyncio.run(test())


def test_a_batch_that_fails_is_tried_again() -> None:
    async def test() -> None:
        async with world() as w:
            fake = Broken()
            fake.bad = range(2, 4)
            runner = Worker(CONFIG, lambda: fake, [w.wire], "broken")
            await runner.start()
            w.runners.append(runner)
            live = w.submit([7, 8], 10)
            await finish([live])
            assert_perfect([live])
            runner.check()

    asyncio.run(test())


@pytest.mark.parametrize("kinds", [(BatchKind.PREFILL,), (BatchKind.SPECULATE,)])
def test_a_replica_whose_batches_of_a_kind_all_fail_is_unhealthy(
    kinds: tuple[BatchKind, ...],
) -> None:
    async def test() -> None:
        async with world() as w:
            fake = Broken()
            fake.bad, fake.bad_kinds = range(1, 1000), kinds
            runner = Worker(CONFIG, lambda: fake, [w.wire], "broken")
            await runner.start()
            w.runners.append(runner)
            live = w.submit([7, 8], 10)
            await w.until(lambda: runner._puller.done())
            with pytest.raises(ReplicaUnhealthy, match="in a row"):
                runner.check()
            assert live.finish is None, "the replica is broken, not the request"
            await w.add_replica()
            await finish([live])
            assert_perfect([live])

    asyncio.run(test())


class Breaking(FakeReplica):
    """Breaks for good in the order number `at`, and then in all that it is asked for."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.begun = 0
        self.runner: Worker | None = None

    def step(self, batch: Any, *rest: Any) -> Any:
        self.begun += 1
        if self.begun >= self.at:
            assert self.runner is not None
            # What the pool has said meanwhile is behind the batch.
            self.runner._jobs.put(ReleaseNote(("somebody",)))
            self.broken = RuntimeError("rank 1 has ended")
            raise self.broken
        return super().step(batch, *rest)

    def release(self, sequence_ids: Iterable[str]) -> None:
        if self.broken is not None:
            raise self.broken
        super().release(sequence_ids)


async def add_breaking(w: World, at: int) -> tuple[Breaking, list[bool]]:
    """The replica, and of each time that it leaves whether a batch was blamed."""
    fake = Breaking(at)
    fake.runner = Worker(CONFIG, lambda: fake, [w.wire], "breaking")
    await fake.runner.start()
    w.runners.append(fake.runner)
    await w.until(lambda: bool(w.wire.actor._replicas))
    left: list[bool] = []
    leave = w.wire.actor.leave

    async def noting(replica_id: str, blamed: bool = False) -> None:
        left.append(blamed)
        await leave(replica_id, blamed)

    w.wire.actor.leave = noting  # type: ignore[method-assign]
    return fake, left


def test_a_replica_that_breaks_in_a_batch_leaves_at_once_with_all_it_holds() -> None:
    async def test() -> None:
        async with world() as w:
            fake, left = await add_breaking(w, at=3)
            runner = fake.runner
            assert runner is not None
            live = [w.submit([7, n], 40) for n in range(4)]
            await w.until(lambda: runner._puller.done())
            with pytest.raises(ReplicaUnhealthy, match="it is broken: rank 1 has ended") as raised:
                runner.check()
            assert raised.value.blames
            assert fake.begun == 3, "no batch was tried on what is broken"
            assert left == [True]
            assert not w.wire.actor._replicas
            await w.add_replica()
            await finish(live)
            assert_perfect(live)

    asyncio.run(test())


def test_a_replica_that_breaks_with_nothing_to_do_leaves_and_blames_nobody() -> None:
    async def test() -> None:
        async with world() as w:
            fake, left = await add_breaking(w, at=1000)
            runner = fake.runner
            assert runner is not None
            runner.check()
            fake.broken = RuntimeError("rank 1 has ended")
            await w.until(lambda: not w.wire.actor._replicas)
            with pytest.raises(ReplicaUnhealthy, match="it is broken: rank 1 has ended") as raised:
                runner.check()
            assert not raised.value.blames
            assert left == [False]
            assert fake.begun == 0

    asyncio.run(test())


def test_a_replica_that_breaks_while_it_drains_keeps_nobody_waiting() -> None:
    async def test() -> None:
        async with world() as w:
            fake, left = await add_breaking(w, at=3)
            runner = fake.runner
            assert runner is not None
            begins = fake.step
            held = threading.Event()

            def step(batch: Any, *rest: Any) -> Any:
                while fake.begun == 2 and not runner._draining:
                    held.set()
                    time.sleep(0.001)
                return begins(batch, *rest)

            fake.step = step  # type: ignore[method-assign]
            live = w.submit([7, 8], 400)
            await w.until(held.is_set)
            async with asyncio.timeout(CONFIG.actors.drain_s / 2):
                await runner.close()
            assert left[0], "the batch in hand broke it"
            await w.add_replica()
            await finish([live])
            assert_perfect([live])

    asyncio.run(test())


class Hanging(FakeReplica):
    """Steps end when `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def step(self, batch: Any, *rest: Any) -> Any:
        self.go.wait(120)
        return super().step(batch, *rest)


async def add_hanging(w: World) -> tuple[Hanging, Worker]:
    fake = Hanging()
    runner = Worker(CONFIG, lambda: fake, [w.wire], "hanging")
    await runner.start()
    w.runners.append(runner)
    return fake, runner


def test_a_hanging_replica_leaves_the_pool_and_stays_away() -> None:
    async def test() -> None:
        async with world() as w:
            fake, runner = await add_hanging(w)
            live = w.submit([7, 8], 10)
            await w.until(lambda: runner._batch_began_s is not None)
            runner.check()
            runner._batch_s_max = 0.3
            await w.until(lambda: not w.wire.actor._replicas)
            with pytest.raises(ReplicaUnhealthy, match="runs for over"):
                runner.check()
            await w.add_replica()
            await finish([live])
            assert_perfect([live])
            fake.go.set()
            await asyncio.to_thread(_wait_for_idle, runner)
            assert len(w.wire.actor._replicas) == 1
            with pytest.raises(ReplicaUnhealthy, match="runs for over"):
                runner.check()
            async with asyncio.timeout(CONFIG.actors.drain_s / 2):
                await runner.close()

    asyncio.run(test())


def test_a_batch_of_an_earlier_membership_that_hangs_is_blamed_on_nobody_of_the_present_one() -> (
    None
):
    async def test() -> None:
        async with world() as w:
            fake, runner = await add_hanging(w)
            w.submit([7, 8], 10)
            await w.until(lambda: runner._batch_began_s is not None)
            # Its client has left when the pool begins anew.
            first = runner.replica_id
            w.wire.restart()
            await w.until(lambda: runner.replica_id != first and runner.replica_id != "")
            runner._batch_s_max = 0.0
            with pytest.raises(ReplicaUnhealthy, match="runs for over") as raised:
                runner.check()
            assert not raised.value.blames
            fake.go.set()

    asyncio.run(test())


def _wait_for_idle(runner: Worker) -> None:
    while runner._batch_began_s is not None:
        time.sleep(0.01)


def test_a_replica_whose_batches_fail_leaves_the_queue_to_others() -> None:
    async def test() -> None:
        async with world() as w:
            fake = Broken()
            fake.bad = range(1, 1000)
            runner = Worker(CONFIG, lambda: fake, [w.wire], "broken")
            await runner.start()
            w.runners.append(runner)
            w.submit([7, 8], 10)
            await w.until(lambda: not w.wire.actor._replicas)
            live = w.submit([7, 9], 10)
            await asyncio.sleep(2 * CONFIG.pool.poll_s)
            assert not live.ended.is_set()
            await w.add_replica()
            await finish([live])
            assert_perfect([live])

    asyncio.run(test())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"target": "another"}, "serves another in float32, but replica0"),
        ({"fingerprint": "f0"}, "its weights or its arithmetic are not those of replica0"),
    ],
)
def test_a_replica_whose_output_may_differ_is_refused(other: dict[str, str], message: str) -> None:
    async def test() -> None:
        async with world() as w:
            await w.add_replica()
            await w.until(lambda: bool(w.wire.actor._replicas))
            fake = FakeReplica()
            fake.spec = replace(fake.spec, **other)
            runner = Worker(CONFIG, lambda: fake, [w.wire], "other")
            await runner.start()
            w.runners.append(runner)
            await w.until(runner._puller.done)
            with pytest.raises(ReplicaUnhealthy, match=message):
                runner.check()
            assert len(w.wire.actor._replicas) == 1

    asyncio.run(test())


def test_loading_errors_reach_the_starter() -> None:
    def load() -> FakeReplica:
        raise OSError("no such model")

    async def test() -> None:
        with pytest.raises(OSError, match="no such model"):
            await Worker(CONFIG, load, [Wire(CONFIG)], "x").start()  # type: ignore[arg-type]

    asyncio.run(test())


def test_an_idle_pool_leaves() -> None:
    left: list[bool] = []
    config = CONFIG.model_copy(
        update={"pool": CONFIG.pool.model_copy(update={"idle_exit_s": 0.05})}
    )

    async def test() -> None:
        actor = PoolActor(config, leave=lambda: left.append(True))
        await actor.status()
        async with asyncio.timeout(100):
            while not left:
                await asyncio.sleep(0.01)

    asyncio.run(test())
