"""What the two ends of a child's channel say: a length in four bytes, then so many bytes.

A reply begins with one byte, a `Reply`.
"""

from __future__ import annotations

import struct
from enum import IntEnum

_LENGTH = struct.Struct("!I")
LENGTH_BYTES = _LENGTH.size


class Reply(IntEnum):
    READY = 0
    """The child has loaded what it needs."""
    DONE = 1
    """The result follows."""
    REFUSED = 2
    """The reason follows."""
    NO_MEMORY = 3
    TOO_LONG = 4
    """The result is longer than is allowed."""


def framed(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


def length_of(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    return int(length)
