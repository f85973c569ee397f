"""Load for any server of OpenAI's API: streams over HTTP, in place of gRPC's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp

from cluster.bench.arrivals import Send
from cluster.bench.figures import Record
from cluster.bench.workload import Unanswered, Workload

_SILENCE_S = 600.0
"""A stream without an event for so long has failed."""
_LINE_BYTES = 1 << 20
_FAILURES = (TimeoutError, aiohttp.ClientError, ValueError, LookupError, TypeError)
"""Of a server that does not answer, or answers otherwise than OpenAI's."""
_SAID_MAX = 300
"""Characters of a refusal that are kept."""
_SALTED = ("lockstep", "vllm")
"""Owners of models, as servers say, that know `cache_salt`."""


class OpenAIServer:
    """One server, by the address before /v1. A context: it keeps connections."""

    def __init__(
        self, url: str, key: str | None, model: str | None = None, chat: bool = False
    ) -> None:
        """`model`: None is the first of /v1/models. `chat`: a prompt is a user's turn."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S, sock_connect=60),
            read_bufsize=_LINE_BYTES,
        )
        self.model = model or ""
        self._chat = chat
        self._salted = False

    async def __aenter__(self) -> OpenAIServer:
        """Asks for its models. Raises Unanswered."""
        try:
            async with self._http.get(f"{self.url}/v1/models") as response:
                response.raise_for_status()
                listed = (await response.json())["data"]
                self.model = self.model or str(listed[0]["id"])
                owners = [model.get("owned_by") for model in listed if model["id"] == self.model]
                self._salted = any(owner in _SALTED for owner in owners)
        except _FAILURES as error:
            await self._http.close()
            raise Unanswered(f"openai: {self.url}/v1/models: {error!r}") from None
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._http.close()

    def sends(self, workload: Workload) -> Send:
        """Streams the answers to the requests of the workload."""
        path = "chat/completions" if self._chat else "completions"

        async def send(number: int, record: Record, now_s: Callable[[], float]) -> None:
            fields = self._fields(workload, number)
            ended = False
            try:
                async with self._http.post(f"{self.url}/v1/{path}", json=fields) as response:
                    if response.status != 200:
                        record.error = f"HTTP {response.status}"
                        record.said = (await response.text())[:_SAID_MAX]
                        return
                    async for line in response.content:
                        if not line.startswith(b"data:"):
                            continue
                        if line[5:].strip() == b"[DONE]":
                            ended = True
                            continue
                        event = json.loads(line[5:])
                        ended |= take_event(record, event, now_s())
                if not ended:
                    record.error = record.error or "no end"
            except (*_FAILURES, AttributeError) as error:
                record.error, record.said = type(error).__name__, str(error)[:_SAID_MAX]

        return send

    def _fields(self, workload: Workload, number: int) -> dict[str, Any]:
        """Of the request; of those that not every server has only what was asked for."""
        prompt, options = workload.prompt(number), workload.options_of(number)
        if not self._salted:
            del options["cache_salt"]
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": options.pop("max_new_tokens"),
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        if self._chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        return fields


def take_event(record: Record, event: dict[str, Any], now_s: float) -> bool:
    """Whether the event ends a text. One says how many tokens there are only at the end: they are
    divided among the events that brought text."""
    if error := event.get("error"):
        said = error if isinstance(error, dict) else {}
        record.error = str(said.get("code") or said.get("type") or error)
        record.said = str(said.get("message") or "")[:_SAID_MAX]
    choices = event.get("choices") or ()
    if any(each.get("text") or (each.get("delta") or {}).get("content") for each in choices):
        record.chunks.append((now_s, 1))
    if usage := event.get("usage"):
        record.prompt_tokens = usage.get("prompt_tokens") or 0
        cached = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = cached.get("cached_tokens") or 0
        events = len(record.chunks)
        new = usage.get("completion_tokens") or events
        record.chunks = [
            (at_s, new * (n + 1) // events - new * n // events)
            for n, (at_s, _) in enumerate(record.chunks)
        ]
    return any(each.get("finish_reason") for each in choices)
