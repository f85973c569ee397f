"""uvicorn's HTTP protocol with bounds: on what comes before a body, and on the time of a request.

Its parser gathers a header piece by piece, in time that grows with the square of its length, and
waits for the rest of a request without a bound. Here a request that is over a bound is refused, and
its connection closed, before it reaches any application.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.frontend.http_api.error_body import error_body

LINE_BYTES_MAX = 16 << 10
"""Of the address in the request line."""
HEAD_BYTES_MAX = 64 << 10
"""Of request line and headers, with the trailers of a body; of what stands between two pieces of a
body, too."""
HEAD_S = 20.0
"""How long they may take to come in; also, how long a new connection may say nothing."""
BODY_S = 60.0
"""How long the body may. The frontend, which says what it reads, gives up before."""
_LINGER_S = 2.0
_LINGER_BYTES = 1 << 20
"""What is read, and dropped, of a refused request: a client that still sends reads no answer from a
connection that is closed."""

_LINE_TOO_LONG = (414, f"the address of the request has more than {LINE_BYTES_MAX} bytes")
_HEAD_TOO_LONG = (431, f"the headers of the request have more than {HEAD_BYTES_MAX} bytes")
_HEAD_TOO_SLOW = (408, f"the headers of the request did not come within {HEAD_S:.0f} s")
_BODY_TOO_SLOW = (408, f"the body of the request did not come within {BODY_S:.0f} s")


class _OverBound(Exception):
    """Raised to the parser, so that it stops."""


class BoundedHttp(HttpToolsProtocol):
    """One connection. uvicorn makes it, and calls the methods of `asyncio.Protocol`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        """Of the request's head and trailers, as far as they are parsed."""
        self._line_ended = False
        self._unparsed = 0
        """Bytes since the parser has last had the end of a head, or a piece of a body."""
        self._moved = False
        """Whether it had, in what is parsed just now."""
        self._bound: tuple[int, str] | None = None
        """The one that the request is over; its connection serves no more."""
        self._upgraded = False
        """Another protocol has the connection."""
        self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._timer is None:
            self._wait_for_head()
        for at in range(0, len(data), HEAD_BYTES_MAX):
            if self._upgraded or self.transport.is_closing():
                return
            if self._bound is not None:
                self._drop(len(data) - at)
                return
            self._parse(data[at : at + HEAD_BYTES_MAX])

    def _parse(self, piece: bytes) -> None:
        self._moved = False
        super().data_received(piece)
        self._unparsed = 0 if self._moved else self._unparsed + len(piece)
        if self._bound is not None:
            return
        if self._in_head and not self._line_ended and self._unparsed:
            self._line_ended = b"\n" in piece
            if not self._line_ended and self._unparsed > LINE_BYTES_MAX:
                self._refuse(_LINE_TOO_LONG)
                return
        if self._unparsed > HEAD_BYTES_MAX:
            self._refuse(_HEAD_TOO_LONG)

    # ------------------------------------------------------------------ the parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._timer is None:
            self._wait_for_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > LINE_BYTES_MAX:
            self._bound = _LINE_TOO_LONG
            raise _OverBound
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX:
            self._bound = _HEAD_TOO_LONG
            raise _OverBound
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._moved, self._in_head = True, False
        self._wait(BODY_S, _BODY_TOO_SLOW)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._moved, self._in_head, self._line_ended = True, True, False
        self._wait(None)
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._wait(None)
        self._upgraded = True
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Of uvicorn's, for what does not parse: here it says what is wrong."""
        self._refuse(self._bound or (400, msg))

    # ------------------------------------------------------------------ the end of a request

    def _wait_for_head(self) -> None:
        self._wait(HEAD_S, _HEAD_TOO_SLOW)

    def _wait(self, bound_s: float | None, late: tuple[int, str] = _HEAD_TOO_SLOW) -> None:
        """Refuse the request if it takes longer than this; None: it is here."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if bound_s is not None:
            self._timer = self.loop.call_later(bound_s, self._late, late)

    def _late(self, bound: tuple[int, str]) -> None:
        if self._in_head and self._answering:
            # Bytes behind a request that is being answered: the answer goes first.
            self._wait_for_head()
        elif self._in_head and not self._unparsed:
            # Nothing was asked.
            self.transport.close()
        else:
            self._refuse(bound)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, bound: tuple[int, str]) -> None:
        """Say so, unless an answer is on its way, and close the connection."""
        self._wait(None)
        self._unset_keepalive_if_required()
        self._bound = bound
        if self.transport.is_closing():
            return
        answered = not self._in_head and self.cycle is not None and self.cycle.response_complete
        if answered or (self._answering and (self._in_head or self.cycle.response_started)):
            self.transport.close()
            return
        if self._answering:
            # The application hears that its client is gone; what it sends goes nowhere.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        status, message = bound
        kind = "INVALID_ARGUMENT" if status != 408 else "DEADLINE_EXCEEDED"
        body = json.dumps(error_body(kind, message, status)).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > _LINGER_BYTES:
            self.transport.abort()
