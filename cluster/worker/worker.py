"""Runs one replica: takes batches from the pool, runs them on a thread, sends the results.

All tensor work happens on one thread, so the event loop stays free to talk to the pool and to
answer health checks. The thread takes the next batch from its queue by itself: it never waits for
a round trip between two batches. What is hosted is given as a factory; this file knows neither
torch nor Ray.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.config import ClusterConfig
from cluster.pool.peers import unlike_elsewhere
from cluster.pool.protocol import (
    WORKER,
    Beat,
    DrainNote,
    LeaveNote,
    PoolPort,
    PoolUnreachable,
    Successor,
)
from cluster.transport import NotEncodable, Stream, StreamLost, encode
from cluster.worker.hosted import HostedReplica, ReplicaUnhealthy
from scheduler.messages import (
    Batch,
    Interrupt,
    Release,
    ReplicaSpec,
    RowFailure,
    RowResult,
    StepFailed,
    StepResult,
)

log = logging.getLogger("lockstep.replica")

_RETRY_S = 0.1


class Worker:
    """One process's replica and its place in the pool. Call `start` on an event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        load: Callable[[], HostedReplica],
        pools: Sequence[PoolPort],
        name: str,
        process: Any = None,
        shard: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` is for people; `process` is what lets the pool ask whether this one lives.

        `pools`: one per shard; `shard` is the one to serve.
        """
        self._beat_s = config.pool.beat_s
        self._drain_s = config.actors.drain_s
        surges = config.actors.surge is not False
        self._successor = Successor.BEFORE if surges else Successor.AFTER
        self._batch_s_max = config.actors.batch_s_max
        self._running: tuple[str, float] | None = None
        """Whose membership's batch runs now, and since when; the thread writes it."""
        self._load = load
        self._pools = pools
        self._shard = shard
        self._name = name
        self._clock = clock
        self._process = process
        self._jobs: queue.SimpleQueue[Callable[[HostedReplica], None] | None] = queue.SimpleQueue()
        """What the thread does next; None: it ends."""
        self._interrupted = 0
        """Batches up to this id end after the step in hand; the thread reads it."""
        self._batch_lost = False
        """The replica broke in the middle of a batch of this membership; the thread writes it."""
        self._drained = asyncio.Event()
        self._draining = False
        self._something_new = asyncio.Event()
        self._stream: Stream | None = None
        """That of the present membership."""
        self.replica_id = ""

    async def start(self) -> ReplicaSpec:
        """Load the models, then serve until `close`. Returns what was loaded, raises what loading
        raises."""
        self._loop = asyncio.get_running_loop()
        loaded: Future[ReplicaSpec] = Future()
        self._thread = threading.Thread(
            target=self._work, args=(loaded,), name="lockstep-replica", daemon=True
        )
        self._thread.start()
        self._spec = await asyncio.wrap_future(loaded)
        self._member = self._loop.create_task(self._serve_forever())
        # Nothing is left to drain then.
        self._member.add_done_callback(lambda _task: self._drained.set())
        return self._spec

    def move_to(self, shard: int) -> None:
        """Serve this shard from now on: finish the batches in hand, hand back the residents."""
        if shard != self._shard:
            log.info("replica %s goes to shard %d", self.replica_id, shard)
            self._shard = shard
            self._something_new.set()

    def check(self) -> None:
        """Raises ReplicaUnhealthy when the process cannot serve: broken, hanging or refused."""
        self._check_batches()
        if self._member.done():
            error = None if self._member.cancelled() else self._member.exception()
            raise ReplicaUnhealthy(f"its loop has died: {error}") from error

    def _check_batches(self) -> None:
        running = self._running
        # Rows of this membership did not cause a batch of one that has ended.
        mine = running is not None and running[0] == self.replica_id
        if running is not None and self._clock() - running[1] > self._batch_s_max:
            raise ReplicaUnhealthy(f"a batch runs for over {self._batch_s_max:g} s", by_batch=mine)
        if (broken := self._replica.broken) is not None:
            raise ReplicaUnhealthy(f"it is broken: {broken}", by_batch=mine or self._batch_lost)
        if not self._thread.is_alive():
            raise ReplicaUnhealthy("no batch can run here any more", by_batch=self._batch_lost)

    async def close(self) -> None:
        """Hand back the residents, finish the batches in hand, leave the pool, end the thread."""
        self._draining = True
        self._something_new.set()
        try:
            async with asyncio.timeout(self._drain_s):
                if not self._member.done():
                    await self._drained.wait()
        except TimeoutError:
            log.warning("replica %s leaves without being drained", self.replica_id)
        if self._stream is not None:
            self._stream.send(LeaveNote())
            await self._stream.close()
        self.end()

    def end(self) -> None:
        """End the loop and the thread, as a process that dies does: the pool is not told."""
        self._member.cancel()
        self._jobs.put(None)

    # ------------------------------------------------------------------ event loop

    async def _serve_forever(self) -> None:
        while not self._draining:
            try:
                await self._serve_one_membership()
            except (PoolUnreachable, StreamLost) as error:
                log.warning("replica %s: no answer from the pool: %s", self.replica_id, error)
                await asyncio.sleep(_RETRY_S)
            except ReplicaUnhealthy as error:
                # To join again would draw the queue to a broken replica; it waits for its end.
                log.error("replica %s leaves the pool: %s", self.replica_id, error)
                raise
            except Exception:
                # The health check will say so, too; a bug must not look like a silent replica.
                log.exception("replica %s: its loop has failed", self.replica_id)
                raise
        # It is about to end: to join anew would only draw new work to it.
        self._drained.set()
        await asyncio.Event().wait()

    async def _serve_one_membership(self) -> None:
        """Join under a new id and serve until the pool ends the stream, or another one is due.

        Raises ReplicaUnhealthy, having left the pool, when this replica should be replaced.
        """
        self._check_batches()
        # They belong to a pool that is gone, or that takes them for somebody else's.
        self._jobs.put(lambda replica: self._release(replica, replica.residents))
        self._interrupted = 0
        shard = self._shard
        pool = self._pools[shard]
        self.replica_id = f"{self._name}.{uuid.uuid4().hex[:6]}"
        if refused := await pool.join(self.replica_id, self._spec, self._process):
            raise ReplicaUnhealthy(refused)
        stream = await pool.connect(WORKER, self.replica_id)
        # Now: of two that come at once one at least must see the other.
        if refused := await unlike_elsewhere(self._spec, {*self._pools} - {pool}):
            await stream.close()
            raise ReplicaUnhealthy(refused)
        log.info("replica %s has joined its pool", self.replica_id)
        handed_over = asyncio.Event()
        reading = self._loop.create_task(self._read(stream, handed_over))
        reading.add_done_callback(self._read_all)
        try:
            self._stream = stream
            while not handed_over.is_set():
                if reading.done():
                    reading.result()
                    raise StreamLost("the pool has ended it")
                await self._attend(stream, shard)
            stream.send(LeaveNote())
        finally:
            self._stream = None
            await stream.close()
            reading.cancel()

    async def _attend(self, stream: Stream, shard: int) -> None:
        """Show that this process lives, drain if another shard is due, and wait for something new.

        Raises ReplicaUnhealthy, having left the pool.
        """
        self._something_new.clear()
        try:
            self._check_batches()
        except ReplicaUnhealthy as unhealthy:
            stream.send(LeaveNote(unhealthy.by_batch))
            raise
        if self._draining:
            stream.send(DrainNote(self._successor))
        elif self._shard != shard:
            stream.send(DrainNote())
        stream.send(Beat())
        try:
            async with asyncio.timeout(self._beat_s):
                await self._something_new.wait()
        except TimeoutError:
            pass

    async def _read(self, stream: Stream, handed_over: asyncio.Event) -> None:
        """Until the pool ends the stream. Raises StreamLost where it breaks."""
        async for messages in stream.frames():
            for message in messages:
                match message:
                    case Interrupt(_, batch_id):
                        self._interrupted = max(self._interrupted, batch_id)
                    case DrainNote():
                        handed_over.set()
                        self._something_new.set()
                    case Release(_, sequence_ids):
                        self._jobs.put(partial(self._release, sequence_ids=sequence_ids))
                    case Batch():
                        if self._spec.overlaps:
                            self._replica.draft_ahead(message)
                        self._jobs.put(partial(self._run, batch=message))

    def _read_all(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled():
            reading.exception()  # which counts no more where this replica has left
        self._something_new.set()

    def _finished(self, result: StepResult | StepFailed) -> None:
        if result.replica_id != self.replica_id or self._stream is None:
            return
        try:
            self._stream.send(result)
        except NotEncodable:
            assert isinstance(result, StepResult)
            self._stream.send(replace(result, rows=_sendable(result.rows)))

    # ------------------------------------------------------------------ thread

    def _work(self, loaded: Future[ReplicaSpec]) -> None:
        loaded.set_running_or_notify_cancel()
        try:
            self._replica = replica = self._load()
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(replica.spec)
        try:
            while (job := self._jobs.get()) is not None:
                job(replica)
        except Exception:
            log.exception("nothing can run here any more")
            self._post(self._something_new.set)

    def _release(self, replica: HostedReplica, sequence_ids: Iterable[str]) -> None:
        if replica.broken is None:  # else nothing need be released
            replica.release(sequence_ids)

    def _run(self, replica: HostedReplica, batch: Batch) -> None:
        if (result := self._result(replica, batch)) is None:
            self._post(self._something_new.set)
        else:
            self._post(self._finished, result)

    def _result(self, replica: HostedReplica, batch: Batch) -> StepResult | StepFailed | None:
        """None: the replica is broken, and the batch is lost with it."""
        if replica.broken is not None:
            return None
        if batch.replica_id != self.replica_id:
            # Of a membership that has ended: its result is waited for no more.
            return StepFailed(batch.replica_id, batch.id, "the replica has joined again")
        self._running = batch.replica_id, self._clock()
        try:
            return replica.step(batch, lambda: self._ends_early(batch))
        except Exception as error:
            log.exception("batch %d failed", batch.id)
            self._batch_lost = batch.replica_id == self.replica_id
            if replica.broken is not None:
                return None
            replica.probe()  # what it raises ends the thread
            self._batch_lost = False
            # A message that cannot be sent would leave the batch without an answer.
            said = f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
            return StepFailed(batch.replica_id, batch.id, said)
        finally:
            self._running = None

    def _ends_early(self, batch: Batch) -> bool:
        """The end of the batch is waited for, or its result no more."""
        return batch.id <= self._interrupted or batch.replica_id != self.replica_id

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            log.warning("the event loop is closed")


def _sendable(rows: Sequence[RowResult]) -> tuple[RowResult, ...]:
    """The rows; a failure in place of each that cannot be sent with so many beside it."""
    found = []
    for row in rows:
        try:
            encode((row,) * len(rows))
            found.append(row)
        except NotEncodable as error:
            failure = RowFailure(f"its answer is too large or cannot be sent: {error}")
            found.append(RowResult(row.sequence_id, failure=failure))
    return tuple(found)
