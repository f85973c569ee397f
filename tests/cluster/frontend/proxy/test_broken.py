"""Proves: where a frontend ends in the middle of a call, Serve's proxy says so: a 503 with the time
to come back before the answer has begun, or while the proxy knows no application, an event that
says how to go on within a stream of events, and nothing else is changed. The client that the page
shows goes on there.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.frontend.proxy.broken import WholeAnswers
from tests.cluster.frontend.http_rig import Answer, http

PAGE = Path(__file__).parents[4] / "docs" / "clients.md"
EVENTS = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json")]


def start(status: int = 200, headers: Sequence[tuple[bytes, bytes]] = JSON) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [*headers]}


def body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def through(*messages: dict[str, Any]) -> tuple[Answer, bool]:
    """What reaches a client of an application that sends this; whether it comes to its end."""
    ended = False

    async def application(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def noting(message: Any) -> None:
            nonlocal ended
            ended |= message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        await WholeAnswers(application)(scope, receive, noting)

    return await http(watched), ended


async def test_an_answer_that_has_not_begun_is_a_503_with_the_time_to_come_back() -> None:
    answer, ended = await through()
    assert (answer.status, ended) == (503, True)
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.error["status"] == "UNAVAILABLE"


async def test_a_404_whose_body_never_comes_is_a_503() -> None:
    answer, ended = await through(start(404))
    assert (answer.status, ended) == (503, True)


async def test_a_proxy_that_knows_no_application_yet_says_when_to_come_back() -> None:
    plain = [(b"content-type", b"text/plain; charset=utf-8")]
    said = b"Path '/v1/completions' not found. Ping http://.../-/routes for available routes."
    answer, ended = await through(start(404, plain), body(said))
    assert (answer.status, ended) == (503, True)
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.error["status"] == "UNAVAILABLE"


async def test_a_stream_of_events_ends_with_one_that_says_how_to_go_on() -> None:
    answer, ended = await through(start(headers=EVENTS), body(b"id: a:0:1\ndata: {}\n\ndat", True))
    assert ended
    *events, nothing = answer.body.decode().split("\n\n")
    assert nothing == ""
    # No id of its own: the last one stays that of the last whole event.
    assert events[:2] == ["id: a:0:1\ndata: {}", "dat"]
    said = json.loads(events[-1].removeprefix("data: "))["error"]
    assert said["status"] == "UNAVAILABLE"
    assert "Last-Event-ID" in said["message"]


async def test_the_function_of_the_page_goes_on_behind_that_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As docs/clients.md has it; the package that it calls is played here."""
    errors = {"APIStatusError": OSError, "APIConnectionError": OSError}
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(**errors))
    monkeypatch.setitem(sys.modules, "httpx2", SimpleNamespace(TransportError=OSError))
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    (source,) = re.findall(r"```python\n(.*?def continued.*?)```", PAGE.read_text(), re.DOTALL)
    told: dict[str, Any] = {}
    exec(source, told)
    cut, _ = await through(start(headers=EVENTS), body(b'id: a:0:1\ndata: {"n": 1}\n\n', True))
    whole, _ = await through(
        start(headers=EVENTS), body(b'id: a:0:2\ndata: {"n": 2}\n\ndata: [DONE]\n\n')
    )
    asked: list[dict[str, str]] = []

    @contextmanager
    def create(extra_headers: dict[str, str], **_more: Any) -> Iterator[Any]:
        asked.append(extra_headers)
        lines = (cut, whole)[len(asked) - 1].body.decode().splitlines()
        yield SimpleNamespace(iter_lines=lambda: lines)

    assert list(told["continued"](create)) == [{"n": 1}, {"n": 2}]
    assert asked == [{}, {"Last-Event-ID": "a:0:1"}]


@pytest.mark.parametrize(
    "messages",
    [
        [start(), body(b"{}")],
        [start(headers=EVENTS), body(b"data: {}\n\n", True), body(b"")],
        [start(500), body(b"{}")],
        [start(404), body(b"{", True), body(b"}")],
        # What a client that waits for so many bytes must see as broken.
        [start(), body(b"{", True)],
    ],
)
async def test_any_other_answer_passes_as_it_is(messages: list[dict[str, Any]]) -> None:
    answer, ended = await through(*messages)
    assert answer.status == messages[0]["status"]
    assert answer.body == b"".join(message["body"] for message in messages[1:])
    assert "retry-after" not in answer.headers
    assert ended == (not messages[-1]["more_body"])


async def test_a_503_of_serves_own_says_when_to_come_back() -> None:
    answer, _ = await through(start(503, [(b"content-type", b"text/plain")]), body(b"no replica"))
    assert int(answer.headers["retry-after"]) >= 1
    answer, _ = await through(start(503, [(b"retry-after", b"7")]), body(b"busy"))
    assert answer.headers["retry-after"] == "7"
