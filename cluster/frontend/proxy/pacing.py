"""Holds back a long answer while its last parts are not on their way.

Serve's `send` returns at once, and Serve joins all that waits into one message to its proxy, which
may be more than a message holds. Serve pickles what it sends: a part that tells when it is pickled
tells that Serve took it, which it does when the parts before are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PART_BYTES_MIN = 64 << 10
"""A shorter part, as those of most streams, passes at once."""
_PARTS_WAITING = 4
_TAKEN_S = 120.0
"""A part that Serve has not taken by then ends the answer."""


class NotTaken(ConnectionError):
    """The answer's parts do not leave this process."""


class PacedAnswers:
    """ASGI middleware for an application in a Serve deployment."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        room = asyncio.Semaphore(_PARTS_WAITING)
        loop = asyncio.get_running_loop()

        def taken() -> None:
            # On the thread that sends.
            loop.call_soon_threadsafe(room.release)

        async def paced(message: Message) -> None:
            if len(message.get("body", b"")) >= PART_BYTES_MIN:
                try:
                    async with asyncio.timeout(_TAKEN_S):
                        await room.acquire()
                except TimeoutError:
                    raise NotTaken(f"a part was not sent within {_TAKEN_S:.0f} s") from None
                message = {**message, "body": _Part(message["body"], taken)}
            await send(message)

        await self._app(scope, receive, paced)


class _Part(bytes):
    """Bytes that call `taken` when they are pickled, once."""

    _taken: Callable[[], None]

    def __new__(cls, data: bytes, taken: Callable[[], None]) -> _Part:
        part = super().__new__(cls, data)
        part._taken = taken
        return part

    def __reduce__(self) -> tuple[Any, ...]:
        self._taken()
        return bytes, (bytes(self),)
