"""Load for the engine of this process: one replica, the scheduler, no Ray and no network.

Requests enter between two batches, so one that is due while a batch runs waits for its end; the
latency counts from when it was due all the same. A place of a closed loop whose request is refused
asks again after the next batch, or after a pause where nothing runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import repeat

from cluster.bench.arrivals import Arrivals, Closed, Extent, Note
from cluster.bench.figures import Record
from cluster.local_engine import LocalEngine, Output
from scheduler.errors import LockstepError
from scheduler.messages import FinishReason, Request

REFUSED_PAUSE_S = 0.01
"""A refusal takes no time here, and each leaves a record: over a network it would take some."""


def drive(
    engine: LocalEngine,
    make: Callable[[int], Request],
    arrivals: Arrivals,
    extent: Extent,
    note: Note = lambda ended: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Record]:
    """Send the requests `make(0)`, `make(1)`, ... and run until all have ended."""
    begun_s = clock()
    records: list[Record] = []
    live: list[tuple[Record, Output]] = []
    closed = isinstance(arrivals, Closed)
    due = repeat(0.0) if isinstance(arrivals, Closed) else arrivals.due_s()
    next_s = next(due)
    while True:
        refused = 0
        while True:
            now_s = clock() - begun_s
            if extent.ended(len(records), now_s if closed else next_s):
                break
            if isinstance(arrivals, Closed):
                if len(live) + refused >= arrivals.in_flight:
                    break
            elif next_s > now_s:
                break
            number = len(records)
            record = Record(number, now_s if closed else next_s, now_s)
            records.append(record)
            next_s = next(due)
            request = make(number)
            record.prompt_tokens = len(request.prompt)
            try:
                live.append((record, engine.submit(request)))
            except LockstepError as error:
                record.error, record.end_s = type(error).__name__, clock() - begun_s
                refused += 1
        if live:
            progressed = engine.advance()
            assert progressed, "the scheduler left requests without a batch"
            now_s = clock() - begun_s
            live = [(record, output) for record, output in live if not _look(record, output, now_s)]
            note(len(records) - len(live))
        elif extent.ended(len(records), now_s if closed else next_s):
            return records
        else:
            sleep(REFUSED_PAUSE_S if closed else max(next_s - now_s, 0.0))


def _look(record: Record, output: Output, now_s: float) -> bool:
    """Note what came since the last look; whether the request has ended."""
    came = len(output.tokens) - record.new_tokens
    if came:
        record.chunks.append((now_s, came))
    if output.reason is None:
        return False
    usage = output.usage
    record.end_s = now_s
    if output.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        record.error = output.reason.name
    record.steps, record.draft_tokens = usage.steps, usage.draft_tokens
    record.accepted_tokens, record.accepted_at = usage.accepted_tokens, usage.accepted_at
    record.recovered, record.cached_tokens = usage.recovered, usage.cached_tokens
    return True
