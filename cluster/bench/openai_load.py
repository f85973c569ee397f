"""Load for any server of OpenAI's API: streams of /v1/completions, in place of gRPC's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp

from cluster.bench.figures import Record
from cluster.bench.load import Ask
from cluster.bench.workload import BenchError, Workload

_SILENCE_S = 600.0
"""A stream without an event for so long has failed."""
_LINE_BYTES = 1 << 20


class OpenAIServer:
    """One server, by the address before /v1. A context: it keeps connections."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S, sock_connect=60),
            read_bufsize=_LINE_BYTES,
        )
        self.model = ""

    async def __aenter__(self) -> OpenAIServer:
        """Asks for the model's name. Raises BenchError."""
        try:
            async with self._http.get(f"{self.url}/v1/models") as response:
                response.raise_for_status()
                self.model = str((await response.json())["data"][0]["id"])
        except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
            await self._http.close()
            raise BenchError(f"openai: {self.url}/v1/models: {error!r}") from None
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._http.close()

    def ask(self, workload: Workload) -> Ask:
        """Streams the answer to a request of the workload."""

        async def ask(number: int, record: Record, now_s: Callable[[], float]) -> None:
            fields = openai_request(workload, number, self.model)
            try:
                async with self._http.post(f"{self.url}/v1/completions", json=fields) as response:
                    if response.status != 200:
                        record.error = f"HTTP {response.status}"
                        return
                    async for line in response.content:
                        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                            continue
                        event = json.loads(line[5:])
                        _take(record, event, now_s())
            except (TimeoutError, aiohttp.ClientError, ValueError) as error:
                record.error = type(error).__name__

        return ask


def openai_request(workload: Workload, number: int, model: str) -> dict[str, Any]:
    """The request's fields; of those that not every server has only what was asked for."""
    prompt, sampling = workload.prompt(number), workload.sampling_of(number)
    fields: dict[str, Any] = {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": workload.max_new_tokens,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": workload.cache_salt(number),
    }
    if workload.ignore_eos:
        fields["ignore_eos"] = True
    if sampling.temperature > 0:
        fields |= {"seed": sampling.seed, "top_p": sampling.top_p}
        fields |= {"top_k": sampling.top_k} if sampling.top_k else {}
        fields |= {"min_p": sampling.min_p} if sampling.min_p else {}
    return fields


def _take(record: Record, event: dict[str, Any], now_s: float) -> None:
    """An event says how many tokens there are only at the end: they are divided among the events
    that brought text."""
    if "error" in event:
        record.error = str(event["error"].get("code") or event["error"].get("type"))
    if any(choice.get("text") for choice in event.get("choices") or ()):
        record.chunks.append((now_s, 1))
    if usage := event.get("usage"):
        record.prompt_tokens = usage["prompt_tokens"]
        cached = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = cached.get("cached_tokens") or 0
        new, events = usage["completion_tokens"], len(record.chunks)
        record.chunks = [
            (at_s, new * (n + 1) // events - new * n // events)
            for n, (at_s, _) in enumerate(record.chunks)
        ]
