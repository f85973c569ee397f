"""Calls and replies as MessagePack, decoded by the types of the called method only.

Nothing a peer sends is run or makes an object of another type than the method's signature names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

MESSAGE_BYTES_MAX = 64 << 20
"""Of one call or reply; the largest is a thousand prompts told again to a pool that restarted."""

_encoder = msgspec.msgpack.Encoder()
_frame = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])


class NotEncodable(ValueError):
    """A message holds what cannot be sent, or is too large; the text says what."""


class NotDecodable(ValueError):
    """A message is not of the type that was agreed on; the text says where."""


@dataclass(frozen=True)
class Signature:
    """What a method takes and returns."""

    arguments: Any
    """A tuple type."""
    reply: Any
    _arguments: msgspec.msgpack.Decoder[Any] = field(init=False, repr=False)
    _reply: msgspec.msgpack.Decoder[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_arguments", msgspec.msgpack.Decoder(self.arguments))
        object.__setattr__(self, "_reply", msgspec.msgpack.Decoder(self.reply))

    def decode_arguments(self, data: msgspec.Raw) -> tuple[Any, ...]:
        """Raises NotDecodable."""
        return _decode(self._arguments, data)  # type: ignore[no-any-return]

    def decode_reply(self, data: msgspec.Raw) -> Any:
        """Raises NotDecodable."""
        return _decode(self._reply, data)


Signatures = Mapping[str, Signature]


def encode(number: int, name: str, value: object) -> bytes:
    """A call (`name` of the method, arguments), or a reply (`name` is an error's text, or empty).

    Raises NotEncodable.
    """
    try:
        data = _encoder.encode((number, name, value))
    except (TypeError, NotImplementedError, OverflowError, RecursionError) as error:
        raise NotEncodable(f"cannot be sent: {error}") from None
    if len(data) > MESSAGE_BYTES_MAX:
        raise NotEncodable(f"{len(data)} bytes, at most {MESSAGE_BYTES_MAX} can be sent")
    return data


def decode(data: bytes) -> tuple[int, str, msgspec.Raw]:
    """The call's number, the method or the error, and what its signature decodes.

    Raises NotDecodable.
    """
    return _decode(_frame, data)  # type: ignore[no-any-return]


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotDecodable(str(error)) from None
