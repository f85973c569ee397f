"""Calls over OpenAI's API, by a client in an environment of its own that continues what breaks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from protos import lockstep_pb2 as pb
from tests.chaos.load import ANSWER_S_MAX, Ask, Outcome

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
"""`make test-clients-light` makes it."""
_SCRIPT = ROOT / "tests" / "changes" / "openai_continued.py"
_REASONS = {"length": pb.FINISH_REASON_LENGTH, "stop": pb.FINISH_REASON_STOP}
_PRIORITIES = {pb.PRIORITY_HIGH: "high", pb.PRIORITY_LOW: "low"}
_LINE_BYTES_MAX = 1 << 20


def takes(ask: Ask) -> bool:
    """Whether OpenAI's API can say this: it has no deadline, and the package cuts no answer."""
    timed = ask.message.HasField("timeout_s")
    return not timed and (ask.stream or ask.cancel_after_s is None)


def body_of(ask: Ask, model: str) -> dict[str, Any]:
    message = ask.message
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(message.prompt_token_ids.ids),
        "max_tokens": message.max_new_tokens,
        "temperature": message.temperature,
        "ignore_eos": message.ignore_eos,
        "stop": list(message.stop),
        "stream": ask.stream,
        "return_token_ids": True,
    }
    if message.temperature > 0:
        body |= {name: getattr(message, name) for name in ("top_k", "top_p", "seed")}
    if message.priority in _PRIORITIES:
        body["priority"] = _PRIORITIES[message.priority]
    return body


class HttpClient:
    """One process, in which each call has a thread."""

    def __init__(self, process: asyncio.subprocess.Process, model: str) -> None:
        self._process = process
        self._model = model
        self._ends: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.begun = 0
        """Streams that have brought something."""

    async def put(self, ask: Ask, bound_s: float = ANSWER_S_MAX) -> Outcome:
        """One request to its end. Never raises for what the cluster does."""
        number, outcome = len(self._ends), Outcome(ask, time.monotonic(), http=True)
        self._ends[number] = asyncio.get_running_loop().create_future()
        call = {"id": number, "body": body_of(ask, self._model)}
        call["cancel_after_s"] = ask.cancel_after_s
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        try:
            async with asyncio.timeout(bound_s):
                seen = await self._ends[number]
        except TimeoutError:
            seen = {"error": f"no end within {bound_s:.0f} s"}
        outcome.ended_s = time.monotonic()
        outcome.tokens, outcome.text = seen.get("tokens", []), seen.get("text", "")
        outcome.silence_s = seen.get("silence_s", 0.0)
        outcome.cancelled = seen.get("cancelled", False)
        if seen.get("reason"):
            outcome.end = pb.End(finish_reason=_REASONS[seen["reason"]])
        if seen["error"]:
            outcome.code, outcome.details = grpc.StatusCode.UNKNOWN, f"over HTTP: {seen['error']}"
        return outcome

    async def read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            told = json.loads(line)
            if not told.get("ended"):
                self.begun += 1
            elif not (end := self._ends[told["id"]]).done():
                end.set_result(told)
        for end in self._ends.values():
            if not end.done():
                end.set_result({"error": "the client has ended"})


@asynccontextmanager
async def http_client(base_url: str, model: str, threads: int) -> AsyncIterator[HttpClient | None]:
    """None where the package is not installed. What has no answer at the end gets none."""
    if not PYTHON.exists():
        yield None
        return
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, _SCRIPT, base_url, str(threads)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES_MAX,
    )
    client = HttpClient(process, model)
    reading = asyncio.create_task(client.read())
    try:
        yield client
    finally:
        reading.cancel()
        process.kill()
        await process.wait()
