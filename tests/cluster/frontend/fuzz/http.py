"""Sends drawn requests to a frontend with the tiny pair behind it, and counts the answers.

`python -m tests.cluster.frontend.fuzz.http --seed 0` ends with status 1 where an answer is a 5xx or
ends as one, does not come or is an error in another shape than OpenAI's, or a sequence is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from fastapi import FastAPI
from grpc import StatusCode
from hypothesis import strategies as st

from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.http_api.bodies import ChatRequest, CompletionRequest
from protos import lockstep_pb2 as pb
from tests.cluster.frontend.fuzz import requests as draw
from tests.cluster.frontend.fuzz.requests import MESSAGE, SOUND
from tests.cluster.frontend.fuzz.structures import ASKED
from tests.cluster.frontend.http_rig import HERMES_TEMPLATE, http, served_tiny
from tests.cluster.frontend.rig import CONFIG, Context, stream, unfinished

ANSWER_S = 60.0
"""An answer that takes longer hangs."""
AT_ONCE = 16
ROUND = 500
"""Requests of one frontend."""
ROUND_S = 550.0
FAULTS = (StatusCode.UNKNOWN, StatusCode.INTERNAL, StatusCode.UNAVAILABLE)

T = TypeVar("T")


def served() -> AbstractAsyncContextManager[tuple[GrpcApi, FastAPI]]:
    few = CONFIG.frontend.model_copy(update={"max_new_tokens": 16})
    config = CONFIG.model_copy(update={"frontend": few})
    return served_tiny(HERMES_TEMPLATE, config, bound_s=ROUND_S)


async def nothing_left(made: GrpcApi) -> None:
    """Until no sequence and no block is in use. Raises TimeoutError."""
    async with asyncio.timeout(ANSWER_S):
        while True:
            status = await made.Status(pb.StatusRequest(), Context())
            left = status.waiting + status.running
            for replica in status.replicas:
                left += replica.residents + replica.kv_blocks - replica.kv_blocks_free
            if not left and not unfinished(made.service):
                return
            await asyncio.sleep(0.01)


def bodies(
    values: Callable[[draw.Kind], Any],
    count: int,
    seed: int,
    kinds: Sequence[draw.Kind] = tuple(draw.KINDS),
) -> list[draw.Asked]:
    """As many of each kind."""
    found = []
    for kind in kinds:
        for fields in draw.drawn(values(kind), -(-count // len(kinds)), seed):
            body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
            found.append(draw.Asked(draw.KINDS[kind], body or b" "))
    return found[:count]


def long_streams(kind: draw.Kind) -> Any:
    """Requests whose clients have time to go."""
    left_out = {"max_completion_tokens", "prompt_logprobs", "echo", "tools", "tool_choice"}
    return draw.well_formed(kind).map(
        lambda fields: (
            {name: fields[name] for name in fields.keys() - left_out}
            | {"stream": True, "max_tokens": 100, "ignore_eos": True}
        )
    )


async def over_http(_made: GrpcApi, app: FastAPI, asked: draw.Asked) -> str:
    """The status; of a stream that ends with an error, that of the error."""
    headers = dict(asked.headers)
    answer = await http(app, asked.body, asked.path, headers, method=asked.method)
    if answer.status >= 400:
        # Messages have Anthropic's shape, which names no field.
        assert "param" in answer.error or answer.json["type"] == "error"
        return f"{answer.status}"
    if b'data: {"error"' not in answer.body:
        return f"{answer.status}"
    code = json.loads(answer.body.rpartition(b"data: ")[2])["error"]["status"]
    return ("5xx" if StatusCode[code] in FAULTS else f"{answer.status}") + f" then {code}"


async def over_grpc(made: GrpcApi, _app: FastAPI, asked: tuple[pb.GenerateRequest, bool]) -> str:
    """The status of the request, in a stream or not."""
    request, streamed = asked
    context = Context()
    if streamed:
        await stream(made, request, context)
    else:
        await made.Generate(request, context)
    code = context.code or StatusCode.OK
    return f"5xx {code.name}" if code in FAULTS else code.name


async def left_early(made: GrpcApi, app: FastAPI, asked: draw.Asked) -> str:
    """The client goes after a moment, whatever has come; Serve cancels the call then."""
    try:
        async with asyncio.timeout(random.Random(asked.body).random()):
            return await over_http(made, app, asked)
    except TimeoutError:
        return "left"


def answered(said: str) -> bool:
    return said in ("200", "OK")


def fine(said: str) -> bool:
    return not said.startswith(("5", "hangs", "raises"))


async def round_of(
    what: str,
    asked: Sequence[T],
    ask: Callable[[GrpcApi, FastAPI, T], Coroutine[Any, Any, str]],
    good: Callable[[str], bool],
) -> int:
    """Returns how many answers are not as they must be."""
    begun_s = time.monotonic()
    gate, told = asyncio.Semaphore(AT_ONCE), Counter[str]()

    async def one(made: GrpcApi, app: FastAPI, request: T) -> None:
        async with gate:
            try:
                async with asyncio.timeout(ANSWER_S):
                    said = await ask(made, app, request)
            except TimeoutError:
                said = "hangs"
            except Exception as error:
                said = f"raises {type(error).__name__}"
        told[said] += 1
        if not good(said):
            print(said, request, file=sys.stderr)

    for begin in range(0, len(asked), ROUND):
        async with served() as (made, app):
            async with asyncio.TaskGroup() as group:
                for request in asked[begin : begin + ROUND]:
                    group.create_task(one(made, app, request))
            await nothing_left(made)
    wrong = sum(count for said, count in told.items() if not good(said))
    listed = ", ".join(f"{said}: {count}" for said, count in sorted(told.items()))
    seconds = time.monotonic() - begun_s
    print(f"{what}: {told.total()} in {seconds:.0f} s, wrong {wrong}; {listed}", flush=True)
    return wrong


async def fuzz(
    seed: int,
    broken: int = 20_000,
    well_formed: int = 2_000,
    odd: int = 2_000,
    grpc: int = 2_000,
    disconnects: int = 1_000,
    structures: int = 2_000,
) -> int:
    """Returns how many answers are not as they must be. `well_formed`: over each API."""
    sound = bodies(draw.well_formed, well_formed, seed)
    sound_messages = draw.drawn(st.tuples(SOUND, st.booleans()), well_formed, seed)
    leaving = bodies(long_streams, disconnects, seed, [CompletionRequest, ChatRequest])
    messages = draw.drawn(st.tuples(MESSAGE, st.booleans()), grpc, seed)
    return (
        await round_of("well-formed over HTTP", sound, over_http, answered)
        + await round_of("disconnects", leaving, left_early, fine)
        + await round_of("well-formed over gRPC", sound_messages, over_grpc, answered)
        + await round_of("any over gRPC", messages, over_grpc, fine)
        + await round_of("broken over HTTP", bodies(draw.broken, broken, seed), over_http, fine)
        + await round_of("structures", draw.drawn(ASKED, structures, seed), over_http, fine)
        + await round_of("odd over HTTP", draw.drawn(draw.odd(), odd, seed), over_http, fine)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    found = asyncio.run(fuzz(parser.parse_args().seed))
    raise SystemExit(1 if found else 0)
