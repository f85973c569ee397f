"""What `lockstep generate` does: one prompt as a stream, or a file with many in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, MessageToJson

from cluster.cli.terminal import Bars, console, failure
from cluster.client import AsyncClient, Client
from cluster.client.channel import Server
from cluster.files import PromptsError, read_prompts
from protos import lockstep_pb2 as pb


def one(server: Server, prompt: str, options: dict[str, Any], as_json: bool) -> int:
    """Stream the answer to stdout, then one line of figures to stderr. Returns the exit status."""
    request = pb.GenerateRequest(prompt=prompt, **options)
    started_s = time.perf_counter()
    first_s = 0.0
    end = pb.End()
    texts: list[str] = []
    token_ids: list[int] = []
    try:
        with Client(server.address, server.api_key, server.tls) as client:
            for chunk in client.stream(request):
                first_s = first_s or time.perf_counter() - started_s
                texts.append(chunk.text)
                token_ids.extend(chunk.token_ids)
                if not as_json:
                    print(chunk.text, end="", flush=True)
                if chunk.HasField("end"):
                    end = chunk.end
    except grpc.RpcError as error:
        if texts and not as_json:
            print()
        console(stderr=True).print(failure(server, error))
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    total_s = time.perf_counter() - started_s
    if as_json:
        response = pb.GenerateResponse(text="".join(texts), token_ids=token_ids, end=end)
        print(MessageToJson(response, preserving_proto_field_name=True, indent=None))
    else:
        print()
        console(stderr=True).print(figures([end], total_s, first_s), style="dim")
    return 0


def many(
    server: Server,
    path: Path,
    limit: int | None,
    options: dict[str, Any],
    concurrency: int,
    as_json: bool,
) -> int:
    """Answers to the prompts of a file, printed in the file's order. Returns the exit status."""
    notes = console(stderr=True)
    try:
        prompts = read_prompts(path, limit)
    except (PromptsError, OSError) as error:
        notes.print(str(error))
        return 2
    started_s = time.perf_counter()
    try:
        answers = asyncio.run(_ask_all(server, prompts, options, concurrency))
    except KeyboardInterrupt:
        return 130
    total_s = time.perf_counter() - started_s
    for prompt, answer in zip(prompts, answers, strict=True):
        if as_json:
            print(_json_line(prompt, answer))
        elif isinstance(answer, grpc.RpcError):
            print(f"### {prompt}\n[{answer.code().name}: {answer.details()}]\n")
        else:
            print(f"### {prompt}\n{answer.text}\n")
    ends = [answer.end for answer in answers if isinstance(answer, pb.GenerateResponse)]
    if ends:
        first_s = sum(end.first_token_s for end in ends) / len(ends)
        notes.print(figures(ends, total_s, first_s), style="dim")
    failed = len(answers) - len(ends)
    if failed:
        notes.print(f"{failed} of {len(answers)} requests failed")
    return 1 if failed else 0


def figures(ends: Sequence[pb.End], total_s: float, first_s: float) -> str:
    """One line: tokens, tokens/s, time to the first token, tokens per row and step."""
    tokens = sum(end.usage.completion_tokens for end in ends)
    steps = sum(end.speculation.steps for end in ends)
    drafted = sum(end.speculation.draft_tokens for end in ends)
    accepted = sum(end.speculation.accepted_tokens for end in ends)
    return (
        f"{tokens} tokens in {total_s:.2f} s ({tokens / total_s:.1f} tokens/s), "
        f"first token after {first_s * 1000:.0f} ms, "
        f"{accepted / steps if steps else 0:.2f} draft tokens accepted per step "
        f"({accepted / drafted if drafted else 0:.0%} of {drafted})"
    )


async def _ask_all(
    server: Server, prompts: Sequence[str], options: dict[str, Any], concurrency: int
) -> list[pb.GenerateResponse | grpc.RpcError]:
    """In the prompts' order; a request that fails is its error. Unary calls: cheapest per token."""
    answers: list[pb.GenerateResponse | grpc.RpcError | None] = [None] * len(prompts)
    gate = asyncio.Semaphore(concurrency)
    async with AsyncClient(server.address, server.api_key, server.tls) as client:
        with Bars() as bars:
            ended = 0

            async def ask(index: int) -> None:
                nonlocal ended
                async with gate:
                    request = pb.GenerateRequest(prompt=prompts[index], **options)
                    try:
                        answers[index] = await client.generate(request)
                    except grpc.RpcError as error:
                        answers[index] = error
                ended += 1
                bars.note("prompts", ended, len(prompts))

            async with asyncio.TaskGroup() as group:
                for index in range(len(prompts)):
                    group.create_task(ask(index))
    return [answer for answer in answers if answer is not None]


def _json_line(prompt: str, answer: pb.GenerateResponse | grpc.RpcError) -> str:
    import json

    if isinstance(answer, grpc.RpcError):
        error = {"code": answer.code().name, "message": answer.details()}
        return json.dumps({"prompt": prompt, "error": error}, ensure_ascii=False)
    fields = MessageToDict(answer, preserving_proto_field_name=True)
    return json.dumps({"prompt": prompt, **fields}, ensure_ascii=False)
