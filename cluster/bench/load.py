"""Load for a running server: many streams at once from one event loop, by default through gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc

from cluster.bench.arrivals import Arrivals, Closed, Extent, Note
from cluster.bench.figures import Record
from cluster.bench.workload import Workload
from cluster.client import AsyncClient
from protos import lockstep_pb2 as pb

Send = Callable[[int, Record, Callable[[], float]], Awaitable[None]]
"""Sends the request of this number, and notes in the record what comes and when, by the clock that
it is given; a failure too."""


def grpc_request(workload: Workload, number: int) -> pb.GenerateRequest:
    """The request as the cluster takes it."""
    prompt = workload.prompt(number)
    request = pb.GenerateRequest(**workload.options_of(number))
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.prompt_token_ids.ids.extend(prompt)
    return request


def over_grpc(client: AsyncClient, make: Callable[[int], pb.GenerateRequest]) -> Send:
    """Streams the answers to `make(0)`, `make(1)`, ..."""

    async def send(number: int, record: Record, now_s: Callable[[], float]) -> None:
        try:
            async for chunk in client.stream(make(number)):
                take_chunk(record, chunk, now_s())
        except grpc.RpcError as error:
            record.error = error.code().name

    return send


async def drive(
    send: Send,
    arrivals: Arrivals,
    extent: Extent,
    note: Note = lambda ended: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Record]:
    """Send the requests 0, 1, ... and wait until all have ended.

    A request that fails is noted with its status code; the load goes on.
    """
    begun_s = clock()
    records: list[Record] = []
    ended = 0

    async def one(due_s: float | None) -> None:
        nonlocal ended
        number = len(records)
        now_s = clock() - begun_s
        record = Record(number, now_s if due_s is None else due_s, now_s)
        records.append(record)
        await send(number, record, lambda: clock() - begun_s)
        record.end_s = clock() - begun_s
        ended += 1
        note(ended)

    async with asyncio.TaskGroup() as group:
        if isinstance(arrivals, Closed):

            async def place() -> None:
                while not extent.ended(len(records), clock() - begun_s):
                    await one(None)

            for _ in range(arrivals.in_flight):
                group.create_task(place())
        else:
            for sent, due_s in enumerate(arrivals.due_s()):
                if extent.ended(sent, due_s):
                    break
                await asyncio.sleep(max(due_s - (clock() - begun_s), 0.0))
                group.create_task(one(due_s))
    return records


def take_chunk(record: Record, chunk: pb.GenerateChunk, now_s: float) -> None:
    if chunk.token_ids:
        record.chunks.append((now_s, len(chunk.token_ids)))
    if chunk.HasField("end"):
        end, speculation = chunk.end, chunk.end.speculation
        record.prompt_tokens = end.usage.prompt_tokens
        record.cached_tokens = end.usage.cached_tokens
        record.steps, record.draft_tokens = speculation.steps, speculation.draft_tokens
        record.accepted_tokens = speculation.accepted_tokens
        record.accepted_at = tuple(speculation.accepted_at)
        record.recovered = end.recovered
