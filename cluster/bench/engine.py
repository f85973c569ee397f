"""Load for the engine of this process: one replica, the scheduler, no Ray and no network.

A batch holds up the event loop, so requests enter between two batches, and one that is due while a
batch runs is sent late; its latency counts from when it was due all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.bench.arrivals import Send
from cluster.bench.figures import Record
from cluster.local.engine import LocalEngine, Output
from scheduler.errors import LockstepError
from scheduler.messages import FinishReason, Request

REFUSED_PAUSE_S = 0.01
"""A refusal takes no time here, and each leaves a record: over a network it would take some."""


def over_engine(engine: LocalEngine, make: Callable[[int], Request]) -> Send:
    """Runs `make(0)`, `make(1)`, ... together, as far as they are sent together."""
    live: dict[asyncio.Future[None], tuple[Record, Output, Callable[[], float]]] = {}
    running: asyncio.Task[None] | None = None

    async def run() -> None:
        try:
            while live:
                progressed = engine.advance()
                assert progressed, "the scheduler left requests without a batch"
                for ended, (record, output, now_s) in live.items():
                    # A load that is interrupted has cancelled it.
                    if _look(record, output, now_s()) and not ended.done():
                        ended.set_result(None)
                # Here each `send` that has ended leaves; in a closed loop the next are sent.
                await asyncio.sleep(0)
        except Exception as error:
            for ended in live:
                if not ended.done():
                    ended.set_exception(error)

    async def send(number: int, record: Record, now_s: Callable[[], float]) -> None:
        nonlocal running
        request = make(number)
        record.prompt_tokens = len(request.prompt)
        try:
            output = engine.submit(request)
        except LockstepError as error:
            record.error, record.said = type(error).__name__, str(error)
            await asyncio.sleep(REFUSED_PAUSE_S)
            return
        ended = asyncio.get_running_loop().create_future()
        live[ended] = record, output, now_s
        if running is None or running.done():
            running = asyncio.create_task(run())
        try:
            await ended
        finally:
            del live[ended]

    return send


def _look(record: Record, output: Output, now_s: float) -> bool:
    """Note what came since the last look; whether the request has ended."""
    came = len(output.tokens) - record.new_tokens
    if came:
        record.chunks.append((now_s, came))
    if output.reason is None:
        return False
    usage = output.usage
    if output.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        record.error = output.reason.name
    record.steps, record.draft_tokens = usage.steps, usage.draft_tokens
    record.accepted_tokens, record.accepted_at = usage.accepted_tokens, usage.accepted_at
    record.recovered, record.cached_tokens = usage.recovered, usage.cached_tokens
    return True
