"""Proves: a replica whose batches fail, hang or break it leaves the pool, and only a batch in hand
counts as a reason; its requests end elsewhere with the right tokens. One that can draft beside a
batch is asked to.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from cluster.worker.hosted import ReplicaUnhealthy
from cluster.worker.worker import Worker
from scheduler.messages import Batch, BatchKind, FinishReason
from tests.cluster.fakes import ClockAhead, FakeReplica
from tests.cluster.pool.rig import CONFIG, Stuck, check, shards
from tests.cluster.wire import Wire, until


class Failing(FakeReplica):
    """Raises on the batches that `fails` says, by how many there were; `for_good`: it is broken
    then, and knows it."""

    def __init__(self, fails: Callable[[int, Batch], bool], for_good: bool = False) -> None:
        super().__init__()
        self._fails, self._for_good = fails, for_good
        self.begun = 0

    def step(self, batch: Batch, *rest: Any) -> Any:
        self.begun += 1
        if self._fails(self.begun, batch):
            error = RuntimeError("rank 1 has ended: \udc80")
            self.broken = error if self._for_good else None
            raise error
        return super().step(batch, *rest)

    def release(self, sequence_ids: Iterable[str]) -> None:
        if self.broken is not None:
            raise self.broken
        super().release(sequence_ids)


class Overlapping(FakeReplica):
    """Takes one row per batch; its first step goes on once it was asked to draft a later batch."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, overlaps=True, rows_max=1)
        self.beside: bool | None = None
        """Whether it was asked while that step ran."""
        self._asked = threading.Condition()
        self._last = 0

    def draft_ahead(self, batch: Batch) -> None:
        with self._asked:
            self._last = batch.id if batch.kind is BatchKind.SPECULATE else self._last
            self._asked.notify()

    def step(self, batch: Batch, *rest: Any) -> Any:
        if batch.kind is BatchKind.SPECULATE and self.beside is None:
            with self._asked:
                self.beside = self._asked.wait_for(lambda: self._last > batch.id, 100)
        return super().step(batch, *rest)


async def ended(worker: Worker, match: str) -> ReplicaUnhealthy:
    """What Serve is told once the replica cannot serve any more."""

    def serves() -> bool:
        with contextlib.suppress(ReplicaUnhealthy):
            worker.check()
            return True
        return False

    await until(lambda: not serves())
    with pytest.raises(ReplicaUnhealthy, match=match) as raised:
        worker.check()
    return raised.value


@pytest.mark.parametrize("kind", [BatchKind.PREFILL, BatchKind.SPECULATE])
async def test_a_row_whose_answer_cannot_be_sent_fails_alone(kind: BatchKind) -> None:
    async with shards(1) as w:
        step, batches = w.fakes[0].step, []
        unsendable, *others = (w.submit([5, 6, number], 20) for number in range(7, 10))

        def spoil(batch: Any, interrupted: Callable[[], bool]) -> Any:
            result = step(batch, interrupted)
            batches.append(batch.id)
            rows = (
                replace(row, extras=(object(),))
                if batch.kind is kind and row.sequence_id == unsendable.pool_id
                else row
                for row in result.rows
            )
            return replace(result, rows=tuple(rows))

        w.fakes[0].step = spoil  # type: ignore[method-assign]
        await check(others)
        await unsendable.ended.wait()
        assert unsendable.finish is not None
        assert unsendable.finish.reason is FinishReason.FAILED
        assert "cannot be sent" in unsendable.finish.message
        assert all(live.finish.usage.recovered == 0 for live in others), "no batch ran again"


async def test_a_batch_that_fails_is_tried_again() -> None:
    async with shards(0) as w:
        worker = await w.add_replica(
            fake=Failing(lambda begun, batch: batch.id and begun in (2, 5))
        )
        live = w.submit([7, 8], 10)
        await check([live])
        worker.check()


async def test_a_replica_that_overlaps_drafts_the_next_batch_while_one_runs() -> None:
    async with shards(0) as w:
        fake = Overlapping()
        await w.add_replica(fake=fake)
        await check([w.submit([7, number], 10) for number in range(2)])
        assert fake.beside


@pytest.mark.parametrize("kind", [BatchKind.PREFILL, BatchKind.SPECULATE])
async def test_a_replica_whose_batches_of_a_kind_all_fail_is_unhealthy(kind: BatchKind) -> None:
    async with shards(0) as w:
        worker = await w.add_replica(fake=Failing(lambda _begun, batch: batch.kind is kind))
        live = w.submit([7, 8], 10)
        await ended(worker, "no batch can run")
        assert live.finish is None, "the replica is broken, not the request"
        await w.add_replica()
        await check([live])


@pytest.mark.parametrize("in_a_batch", [True, False])
async def test_a_replica_that_breaks_leaves_at_once_with_all_it_holds(in_a_batch: bool) -> None:
    async with shards(0) as w:
        fake = Failing(lambda begun, _batch: begun == 3, for_good=True)
        worker = await w.add_replica(fake=fake)
        worker.check()
        lives = [w.submit([7, n], 40) for n in range(4)] if in_a_batch else []
        if not in_a_batch:
            fake.broken = RuntimeError("rank 1 has ended: \udc80")
        await until(lambda: not w.wire.replicas)
        unhealthy = await ended(worker, "it is broken: rank 1 has ended")
        assert unhealthy.by_batch == in_a_batch
        assert fake.begun == (3 if in_a_batch else 0), "no batch was tried on what is broken"
        await w.add_replica()
        await check(lives)
        assert any(live.record.deaths for live in lives) == in_a_batch


async def test_a_replica_that_breaks_while_it_drains_delays_no_request() -> None:
    async with shards(0) as w:
        held, drains = threading.Event(), threading.Event()

        def fails(begun: int, _batch: Batch) -> bool:
            if begun == 3:
                held.set()
                drains.wait(100)
            return begun == 3

        worker = await w.add_replica(fake=Failing(fails, for_good=True))
        live = w.submit([7, 8], 400)
        await until(held.is_set)
        async with asyncio.timeout(CONFIG.actors.drain_s / 2):
            closing = asyncio.ensure_future(worker.close())
            await asyncio.sleep(0)
            drains.set()
            await closing
        await w.add_replica()
        await check([live])
        assert live.record.deaths == 1, "the batch in hand broke it"


async def test_a_batch_of_an_earlier_membership_that_hangs_counts_against_no_present_row() -> None:
    async with shards(0) as w:
        fake, clock = Stuck(), ClockAhead()
        worker = await w.add_replica(fake=fake, clock=clock)
        w.submit([7, 8], 10)
        await until(fake.begun.is_set)
        # Its client has left when the pool begins anew.
        first = worker.replica_id
        w.wire.restart()
        await until(lambda: worker.replica_id != first and worker.replica_id != "")
        clock.ahead_s = CONFIG.actors.batch_s_max
        with pytest.raises(ReplicaUnhealthy, match="runs for over") as raised:
            worker.check()
        assert not raised.value.by_batch
        fake.let_go.set()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"target": "another"}, "serves another in float32, but replica0"),
        ({"fingerprint": "f0"}, "its weights or its arithmetic are not those of replica0"),
    ],
)
@pytest.mark.parametrize("shard", [0, 1])
async def test_a_replica_of_another_output_is_refused(
    other: dict[str, str], message: str, shard: int
) -> None:
    async with shards(1, 0) as w:
        fake = FakeReplica()
        fake.spec = replace(fake.spec, **other)
        await ended(await w.add_replica(shard, fake), message)
        assert len(w.wire.replicas) == 1


async def test_loading_errors_reach_the_starter() -> None:
    def load() -> FakeReplica:
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        await Worker(CONFIG, load, [Wire(CONFIG)], "x").start()  # type: ignore[arg-type]
