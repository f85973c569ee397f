"""One side of a stream of typed messages between two processes. Knows neither TLS nor addresses.

Messages are MessagePack, decoded by the types that were agreed on only: nothing that a peer sends
is run or makes an object of another type than its side of the stream may send. What goes out
together is one frame: an array of messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from msgspec import DecodeError
from msgspec.msgpack import Decoder, Encoder

log = logging.getLogger("lockstep.transport")

FRAME_BYTES_MAX = 1 << 30
"""Of one frame: of a single request, or of all that a pool tells a frontend in a few
milliseconds."""
_CLOSE_S = 0.5
"""How long what was sent may take to leave, and the other side to end the stream."""

_encoder = Encoder()
_END = _encoder.encode([])
"""A frame of no message: the stream ends."""


class NotEncodable(ValueError):
    """A message holds what cannot be sent, or is too large; the text says what."""


class StreamLost(ConnectionError):
    """The stream has ended; what was sent last may not have arrived."""


def encode(messages: Sequence[object]) -> bytes:
    """A frame. Raises NotEncodable."""
    try:
        frame = _encoder.encode(messages)
    except (
        TypeError,
        NotImplementedError,
        OverflowError,
        RecursionError,
        UnicodeEncodeError,
    ) as error:
        raise NotEncodable(f"cannot be sent: {error}") from None
    if len(frame) > FRAME_BYTES_MAX:
        raise NotEncodable(f"{len(frame)} bytes, at most {FRAME_BYTES_MAX} can be sent")
    return frame


@dataclass(frozen=True)
class StreamKind:
    """A stream by its name, and frames of what each side sends on it."""

    name: str
    calling: Decoder[list[Any]]
    called: Decoder[list[Any]]


class Stream:
    """Messages arrive whole and in order, or the stream is lost. One event loop uses it."""

    def __init__(
        self,
        received: Decoder[list[Any]],
        read: Callable[[], Awaitable[Any]],
        write: Callable[[bytes], Awaitable[Any]],
        cancel: Callable[[], Any] = lambda: None,
        close: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        """`read` gives a frame or `grpc.aio.EOF`; `cancel` ends both, `close` frees the rest."""
        self._received = received
        self._read = read
        self._write = write
        self._cancel = cancel
        self._close = close
        self._frames: deque[bytes] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        """Nothing comes any more."""
        self.lost = False
        """Whether nothing can be sent any more."""

    def send(self, *messages: object) -> None:
        """In one frame, after all that was sent before; on a lost stream it does nothing.

        Raises NotEncodable for what cannot be sent; nothing of it is then.
        """
        self._put(encode(messages))

    def end(self) -> None:
        """Have the other side end the stream once it has all that was sent."""
        self._put(_END)

    def cancel(self) -> None:
        """End it now; what iterates over it is told so."""
        self.lost = True
        self._cancel()

    async def close(self) -> None:
        """End it once the other side has all that was sent, or does not take it in time."""
        self.end()
        try:
            await self.flush()
            async with asyncio.timeout(_CLOSE_S):
                await self._ended.wait()
        except TimeoutError:
            pass
        finally:
            self.cancel()
            if self._close is not None:
                await self._close()

    async def flush(self) -> None:
        """Returns when what was sent has left, or does not in time."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_CLOSE_S)

    async def frames(self) -> AsyncIterator[list[Any]]:
        """What the other side sends, frame by frame, until it ends the stream.

        Raises StreamLost where it breaks, or where the other side says what it must not.
        """
        try:
            while (frame := await self._next()) is not grpc.aio.EOF:
                messages = self._received.decode(frame)
                if not messages:
                    return
                yield messages
        except (DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StreamLost(f"a message that was not agreed on: {error}") from None
        finally:
            self.lost = True
            self._ended.set()

    async def _next(self) -> Any:
        try:
            return await self._read()
        except grpc.aio.AioRpcError as error:
            raise StreamLost(f"{error.code().name}: {error.details()}") from None
        except asyncio.CancelledError:
            # gRPC says so, too, when the stream was cancelled and not the reading task.
            task = asyncio.current_task()
            if self.lost and task is not None and not task.cancelling():
                raise StreamLost("it was ended here") from None
            raise

    def _put(self, frame: bytes) -> None:
        if self.lost:
            return
        self._frames.append(frame)
        if self._writing is None or self._writing.done():
            # By a task of its own: gRPC ends the stream with a task that is cancelled in a write.
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            while self._frames:
                await self._write(self._frames.popleft())
        except Exception as error:
            # What reads is told, too.
            log.info("a stream has ended while it was written to: %s", error)
            self.lost = True
            self._frames.clear()
