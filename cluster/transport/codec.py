"""Messages between processes as MessagePack, decoded by the types that were agreed on only.

What goes out together is one frame: an array of messages. Nothing that a peer sends is run or makes
an object of another type than its side of the stream may send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

FRAME_BYTES_MAX = 64 << 20
"""Of one frame; the largest holds a single request with a prompt of millions of tokens."""

_encoder = msgspec.msgpack.Encoder()


class NotEncodable(ValueError):
    """A message holds what cannot be sent, or is too large; the text says what."""


class NotDecodable(ValueError):
    """A frame is not of the messages that were agreed on; the text says where."""


@dataclass(frozen=True)
class Messages:
    """What one side of a stream may send: a type, or a union of types."""

    of: Any
    _decoder: msgspec.msgpack.Decoder[list[Any]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_decoder", msgspec.msgpack.Decoder(list[self.of]))  # type: ignore[name-defined]

    def decode(self, frame: bytes) -> list[Any]:
        """Raises NotDecodable."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotDecodable(str(error)) from None


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
