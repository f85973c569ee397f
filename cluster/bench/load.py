"""Load for a running cluster, through gRPC."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from cluster.bench.arrivals import Send
from cluster.bench.figures import Record
from cluster.bench.workload import Workload
from cluster.client import AsyncClient
from protos import lockstep_pb2 as pb


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
            record.error, record.said = error.code().name, error.details() or ""

    return send


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
