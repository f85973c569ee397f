"""Proves: through lost calls, lost replies, dying replicas and a restarting pool, every request
ends exactly once with the tokens of a perfect world, and nothing stays behind.

Pool actor, workers and session run in one event loop, without Ray.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cluster.config import ClusterConfig, from_args
from cluster.frontend.in_flight import InFlightRequest
from cluster.pool.actor import PoolActor
from cluster.pool.peers import WorkerPeer
from cluster.pool.protocol import FRONTEND, ReleaseNote
from cluster.pool.session import PoolSession
from cluster.transport.stream import Stream, StreamKind
from cluster.worker.worker import ReplicaUnhealthy, Worker, _Stop
from scheduler.messages import BatchKind, FinishReason, RejectCode, Request
from tests.cluster.fakes import FakeReplica, perfect
from tests.cluster.wire import Wire

CONFIG = from_args(
    {
        "scheduler": {"rows_max": 4},
        "pool": {"lease_s": 0.5, "beat_s": 0.1, "tick_s": 0.01, "gather_ms": 2},
        "actors": {"drain_s": 20},
    }
)
TIMEOUT_S = 60.0


class World:
    """One pool, its replicas and one frontend's session."""

    def __init__(self, wire: Wire, config: ClusterConfig) -> None:
        self.wire = wire
        self.config = config
        self.session = PoolSession(wire, "frontend", config.pool.beat_s, unreachable_s=1000.0)
        self.workers: list[Worker] = []
        self.fakes: list[FakeReplica] = []

    async def add_replica(self, step_s: float = 0.002, **options: Any) -> Worker:
        return await self.host(FakeReplica(step_s, **options))

    async def host(self, fake: FakeReplica) -> Worker:
        name = f"replica{len(self.workers)}"
        worker = Worker(self.config, lambda: fake, [self.wire], name, process=fake)
        await worker.start()
        self.fakes.append(fake)
        self.workers.append(worker)
        return worker

    def submit(self, prompt: list[int], count: int, **options: Any) -> InFlightRequest:
        timeout_s = options.pop("timeout_s", TIMEOUT_S)
        return self.session.submit(Request("x", tuple(prompt), count, **options), timeout_s)

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
    made.session.start()
    try:
        async with asyncio.timeout(100):
            yield made
    finally:
        made.wire.loss = 0.0
        await made.session.close()
        for worker in made.workers:
            worker._member.cancel()
            worker._jobs.put(_Stop())
        made.wire.close()


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


async def test_many_requests_on_two_replicas() -> None:
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


@pytest.mark.parametrize("seed", range(4))
async def test_lost_calls_and_replies_change_no_token(seed: int) -> None:
    async with world(loss=0.05, seed=seed) as w:
        await w.add_replica()
        await w.add_replica()
        requests = [w.submit(prompt, 25) for prompt in prompts(12, seed)]
        await finish(requests)
        assert_perfect(requests)


async def test_a_restarted_pool_is_told_everything_again() -> None:
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


@pytest.mark.parametrize("lost", ["stream", "lease"])
async def test_a_session_that_is_given_up_is_ended_and_its_figures_are_told(lost: str) -> None:
    """The pool lives on; only the session is over, with its stream or by its lease."""

    async with world() as w:
        await w.add_replica(step_s=0.01)
        requests = [w.submit(prompt, 120) for prompt in prompts(6)]
        await w.until(lambda: all(len(live.tokens) > 20 for live in requests))
        if lost == "stream":
            w.wire.break_streams()
        else:
            w.wire.actor._lose_frontend(w.session._session, "is silent")
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


async def test_a_restarted_pool_refuses_nothing_that_was_accepted_before() -> None:
    config = CONFIG.model_copy(
        update={"scheduler": CONFIG.scheduler.model_copy(update={"waiting_requests_max": 2})}
    )
    async with world(config=config) as w:
        first = await w.add_replica(step_s=0.01)
        requests: list[InFlightRequest] = []
        for prompt in prompts(6):
            requests.append(w.submit(prompt, 300))
            await w.until(lambda: bool(requests[-1].tokens))
        first._member.cancel()
        w.wire.restart()
        await w.until(lambda: w.wire.actor._scheduler.snapshot().waiting == 6)
        await w.add_replica()
        await finish(requests)
        assert_perfect(requests)


async def test_what_was_accepted_waits_for_a_replica_that_holds_it_before_its_first_token() -> None:
    async with world() as w:
        large = await w.add_replica(prefill_s=2.0)
        live = w.submit([5, 6], 300)
        await w.until(lambda: live.checked)
        large._member.cancel()
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


async def test_a_pool_that_itself_stood_still_takes_no_peer_for_lost() -> None:
    now_s = 0.0
    actor = PoolActor(CONFIG, clock=lambda: now_s)
    stream = Stream(FRONTEND.calling, asyncio.Event().wait, asyncio.sleep)
    await actor.join("r", FakeReplica().spec, None)
    serving = asyncio.create_task(actor.serve_frontend("f", stream))
    await asyncio.sleep(0)
    now_s += 10 * CONFIG.pool.lease_s
    actor.tick()
    assert (set(actor._workers), set(actor._frontends)) == ({"r"}, {"f"})
    # Nor does that make anybody's silence good for ever.
    for _ in range(12):
        now_s += CONFIG.pool.lease_s / 10
        actor.tick()
    assert (set(actor._workers), set(actor._frontends)) == (set(), set())
    assert actor._ticker is not None
    actor._ticker.cancel()
    serving.cancel()


async def test_a_frontend_that_was_lost_starts_over() -> None:
    async with world() as w:
        await w.add_replica(step_s=0.01)
        first = [w.submit(prompt, 200) for prompt in prompts(3)]
        await w.until(lambda: all(len(live.tokens) > 5 for live in first))
        w.wire.flows.clear()
        await w.until(lambda: not w.wire.actor._frontends)
        second = [w.submit(prompt, 20) for prompt in prompts(3, seed=1)]
        w.wire.flows.set()
        await finish(first + second)
        assert_perfect(first + second)
        assert {live.recovered for live in first} == {1}


async def test_a_silent_replica_loses_its_residents_to_another() -> None:
    async with world() as w:
        dying = await w.add_replica(step_s=0.01)
        requests = [w.submit(prompt, 60) for prompt in prompts(3)]
        await w.until(lambda: all(len(live.tokens) > 5 for live in requests))
        dying._member.cancel()
        await w.add_replica()
        await finish(requests)
        assert_perfect(requests)
        assert all(live.finish.usage.recovered == 1 for live in requests)  # type: ignore[union-attr]


async def test_a_dead_process_is_noticed_before_its_lease_ends() -> None:
    dead: list[FakeReplica] = []

    async def lives(process: FakeReplica) -> bool:
        return process not in dead

    # Longer than the test may take.
    pool = CONFIG.pool.model_copy(update={"lease_s": 1000.0})
    async with world(config=CONFIG.model_copy(update={"pool": pool}), probe=lives) as w:
        worker = await w.add_replica()
        dead.append(w.fakes[0])
        await w.until(lambda: worker.replica_id not in w.wire.actor._workers)


@pytest.mark.parametrize(
    ("lives", "silent", "loss"),
    [
        pytest.param(False, False, ("has died", True), id="dead"),
        pytest.param(True, False, ("has lost its stream", False), id="only the stream is lost"),
        pytest.param(None, True, ("is silent for 3.1 s", True), id="no answer, not even Ray's"),
        pytest.param(True, True, ("is silent for 3.1 s", False), id="only Ray is answered"),
    ],
)
async def test_a_loss_counts_against_requests_if_the_process_is_dead_or_stuck(
    lives: bool | None, silent: bool, loss: tuple[str, bool]
) -> None:
    async def probe(_process: object) -> bool | None:
        return lives

    worker = WorkerPeer(FakeReplica().spec, object(), heard_s=0.0)
    assert worker.loss(probe, 1.0, 3.0) is None
    worker.lost_stream = not silent
    found = None
    for tenth in range(16, 32):
        assert found is None
        worker.heard_s = 0.0 if silent else tenth / 10
        found = worker.loss(probe, tenth / 10, 3.0)
        await asyncio.sleep(0)
        if found and not silent:
            break
    assert found == loss


async def test_a_long_batch_keeps_its_lease() -> None:
    async with world() as w:
        await w.add_replica(step_s=0.8)
        requests = [w.submit(prompt, 2) for prompt in prompts(6)]
        await finish(requests)
        assert_perfect(requests)
        assert all(live.finish.usage.recovered == 0 for live in requests)  # type: ignore[union-attr]


async def test_a_draining_replica_hands_its_residents_over() -> None:
    async with world() as w:
        going = await w.add_replica(step_s=0.01)
        requests = [w.submit(prompt, 60) for prompt in prompts(6)]
        await w.until(lambda: all(live.tokens for live in requests))
        await w.add_replica()
        await going.close()
        assert going.replica_id not in w.wire.actor._workers
        await asyncio.to_thread(going._thread.join, 5)
        assert not going._thread.is_alive()
        await finish(requests)
        assert_perfect(requests)


async def test_a_cancelled_request_frees_its_blocks() -> None:
    async with world() as w:
        await w.add_replica(step_s=0.01)
        requests = [w.submit(prompt, 200) for prompt in prompts(5)]
        await w.until(lambda: all(live.tokens for live in requests))
        for live in requests:
            w.session.cancel(live)
            w.session.cancel(live)
        await finish(requests)
        assert {live.finish.reason for live in requests if live.finish} == {FinishReason.CANCELLED}
        await w.until(lambda: w.reserved_blocks() == 0)


async def test_a_session_that_is_closed_has_ended_in_the_pool_too() -> None:
    async with world() as w:
        await w.add_replica(step_s=0.01)
        w.submit([3, 4], 400)
        await w.until(lambda: w.reserved_blocks() > 0)
        await w.session.close()
        await w.until(lambda: w.reserved_blocks() == 0)
        assert not w.wire.actor._owners
        assert not w.wire.actor._frontends


async def test_a_deadline_ends_a_request_with_its_tokens_so_far() -> None:
    ahead_s = 0.0
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


def half_dead(wire: Wire) -> Callable[[], int]:
    """From now on the pool lets every peer in, and ends every stream at once; returns a count."""
    calls = 0

    async def connect(kind: StreamKind, _name: str) -> Stream:
        nonlocal calls
        calls += 1
        if calls > 500:
            raise RuntimeError("called again and again without a pause")

        async def eof() -> Any:
            return grpc.aio.EOF

        return Stream(kind.called, eof, asyncio.sleep)

    wire.connect = connect  # type: ignore[method-assign]
    wire.break_streams()
    return lambda: calls


async def test_a_pool_that_only_says_it_lives_is_asked_with_pauses_and_deadlines_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.pool.session._OVERDUE_S", 0.1)
    async with world() as w:
        calls = half_dead(w.wire)
        live = w.submit([5, 6], 10, timeout_s=0.2)
        await live.ended.wait()
        assert live.finish is not None
        assert live.finish.reason is FinishReason.DEADLINE
        assert calls() > 1
        w.session.check()
        # Once it answers again, all is well.
        del w.wire.connect
        await w.add_replica()
        later = w.submit([5, 6], 10)
        await finish([later])
        assert_perfect([later])


@pytest.mark.parametrize("lives", [False, True])
async def test_a_pool_that_answers_nothing_ends_requests_as_unreachable(lives: bool) -> None:
    async with world() as w:
        w.session._unreachable_s = 0.3
        if lives:
            half_dead(w.wire)
        else:
            w.wire.loss = 1.0
        live = w.submit([5, 6], 10)
        await live.ended.wait()
        assert live.unreachable


async def test_a_refused_request_says_why() -> None:
    async with world() as w:
        await w.add_replica()
        await w.until(lambda: bool(w.wire.actor._workers))
        live = w.submit([100_000], 5)
        await finish([live])
        assert live.reject is not None
        assert (live.reject.code, live.reject.field) == (RejectCode.INVALID, "prompt")


async def test_committed_tokens_of_a_client_are_not_generated_again() -> None:
    async with world() as w:
        await w.add_replica()
        whole = perfect([7, 8], 30)
        live = w.submit([7, 8], 30, committed=tuple(whole[:12]))
        await finish([live])
        assert live.tokens == whole


class Broken(FakeReplica):
    """Raises on the batches whose numbers are in `bad`."""

    bad: range = range(0)
    bad_kinds: tuple[BatchKind, ...] = tuple(BatchKind)

    def step(self, batch: Any, *rest: Any) -> Any:
        if batch.id in self.bad and batch.kind in self.bad_kinds:
            raise MemoryError("too much")
        return super().step(batch, *rest)


async def test_a_result_that_cannot_be_sent_is_a_failed_batch() -> None:
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


async def test_a_batch_that_fails_is_tried_again() -> None:
    async with world() as w:
        fake = Broken()
        fake.bad = range(2, 4)
        worker = await w.host(fake)
        live = w.submit([7, 8], 10)
        await finish([live])
        assert_perfect([live])
        worker.check()


@pytest.mark.parametrize("kinds", [(BatchKind.PREFILL,), (BatchKind.SPECULATE,)])
async def test_a_replica_whose_batches_of_a_kind_all_fail_is_unhealthy(
    kinds: tuple[BatchKind, ...],
) -> None:
    async with world() as w:
        fake = Broken()
        fake.bad, fake.bad_kinds = range(1, 1000), kinds
        worker = await w.host(fake)
        live = w.submit([7, 8], 10)
        await w.until(lambda: worker._member.done())
        with pytest.raises(ReplicaUnhealthy, match="in a row"):
            worker.check()
        assert live.finish is None, "the replica is broken, not the request"
        await w.add_replica()
        await finish([live])
        assert_perfect([live])


class Breaking(FakeReplica):
    """Breaks for good in the batch number `at`, and then in all that it is asked for."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.begun = 0
        self.worker: Worker | None = None

    def step(self, batch: Any, *rest: Any) -> Any:
        self.begun += 1
        if self.begun >= self.at:
            assert self.worker is not None
            # What the pool has said meanwhile is behind the batch.
            self.worker._jobs.put(ReleaseNote(("somebody",)))
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
    fake.worker = await w.host(fake)
    await w.until(lambda: bool(w.wire.actor._workers))
    left: list[bool] = []
    lose = w.wire.actor._lose_worker

    def noting(replica_id: str, why: str, blamed: bool) -> None:
        left.append(blamed)
        lose(replica_id, why, blamed)

    w.wire.actor._lose_worker = noting  # type: ignore[method-assign]
    return fake, left


async def test_a_replica_that_breaks_in_a_batch_leaves_at_once_with_all_it_holds() -> None:
    async with world() as w:
        fake, left = await add_breaking(w, at=3)
        worker = fake.worker
        assert worker is not None
        live = [w.submit([7, n], 40) for n in range(4)]
        await w.until(lambda: worker._member.done())
        with pytest.raises(ReplicaUnhealthy, match="it is broken: rank 1 has ended") as raised:
            worker.check()
        assert raised.value.blames
        assert fake.begun == 3, "no batch was tried on what is broken"
        assert left == [True]
        assert not w.wire.actor._workers
        await w.add_replica()
        await finish(live)
        assert_perfect(live)


async def test_a_replica_that_breaks_with_nothing_to_do_leaves_and_blames_no_batch() -> None:
    async with world() as w:
        fake, left = await add_breaking(w, at=1000)
        worker = fake.worker
        assert worker is not None
        worker.check()
        fake.broken = RuntimeError("rank 1 has ended")
        await w.until(lambda: not w.wire.actor._workers)
        with pytest.raises(ReplicaUnhealthy, match="it is broken: rank 1 has ended") as raised:
            worker.check()
        assert not raised.value.blames
        assert left == [False]
        assert fake.begun == 0


async def test_a_replica_that_breaks_while_it_drains_delays_no_request() -> None:
    async with world() as w:
        fake, left = await add_breaking(w, at=3)
        worker = fake.worker
        assert worker is not None
        begins = fake.step
        held = threading.Event()

        def step(batch: Any, *rest: Any) -> Any:
            while fake.begun == 2 and not worker._draining:
                held.set()
                time.sleep(0.001)
            return begins(batch, *rest)

        fake.step = step  # type: ignore[method-assign]
        live = w.submit([7, 8], 400)
        await w.until(held.is_set)
        async with asyncio.timeout(CONFIG.actors.drain_s / 2):
            await worker.close()
        assert left[0], "the batch in hand broke it"
        await w.add_replica()
        await finish([live])
        assert_perfect([live])


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
    worker = await w.host(fake)
    return fake, worker


async def test_a_hanging_replica_leaves_the_pool_and_stays_away() -> None:
    async with world() as w:
        fake, worker = await add_hanging(w)
        live = w.submit([7, 8], 10)
        await w.until(lambda: worker._batch_began_s is not None)
        worker.check()
        worker._batch_s_max = 0.3
        await w.until(lambda: not w.wire.actor._workers)
        with pytest.raises(ReplicaUnhealthy, match="runs for over"):
            worker.check()
        await w.add_replica()
        await finish([live])
        assert_perfect([live])
        fake.go.set()
        await asyncio.to_thread(_wait_for_idle, worker)
        assert len(w.wire.actor._workers) == 1
        with pytest.raises(ReplicaUnhealthy, match="runs for over"):
            worker.check()
        async with asyncio.timeout(CONFIG.actors.drain_s / 2):
            await worker.close()


async def test_a_batch_of_an_earlier_membership_that_hangs_is_blamed_on_no_present_row() -> None:
    async with world() as w:
        fake, worker = await add_hanging(w)
        w.submit([7, 8], 10)
        await w.until(lambda: worker._batch_began_s is not None)
        # Its client has left when the pool begins anew.
        first = worker.replica_id
        w.wire.restart()
        await w.until(lambda: worker.replica_id != first and worker.replica_id != "")
        worker._batch_s_max = 0.0
        with pytest.raises(ReplicaUnhealthy, match="runs for over") as raised:
            worker.check()
        assert not raised.value.blames
        fake.go.set()


def _wait_for_idle(worker: Worker) -> None:
    while worker._batch_began_s is not None:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"target": "another"}, "serves another in float32, but replica0"),
        ({"fingerprint": "f0"}, "its weights or its arithmetic are not those of replica0"),
    ],
)
async def test_a_replica_of_another_output_is_refused(other: dict[str, str], message: str) -> None:
    async with world() as w:
        await w.add_replica()
        await w.until(lambda: bool(w.wire.actor._workers))
        fake = FakeReplica()
        fake.spec = replace(fake.spec, **other)
        worker = await w.host(fake)
        await w.until(worker._member.done)
        with pytest.raises(ReplicaUnhealthy, match=message):
            worker.check()
        assert len(w.wire.actor._workers) == 1


async def test_loading_errors_reach_the_starter() -> None:
    def load() -> FakeReplica:
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        await Worker(CONFIG, load, [Wire(CONFIG)], "x").start()  # type: ignore[arg-type]


async def test_an_idle_pool_leaves() -> None:
    left: list[bool] = []
    config = CONFIG.model_copy(
        update={"pool": CONFIG.pool.model_copy(update={"idle_exit_s": 0.05})}
    )
    actor = PoolActor(config, leave=lambda: left.append(True))
    await actor.status()
    async with asyncio.timeout(100):
        while not left:
            await asyncio.sleep(0.01)
