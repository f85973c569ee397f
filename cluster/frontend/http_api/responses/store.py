"""Responses that may be asked for again: of one frontend, as long as there is room."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.frontend.http_api.bodies.responses import Turn
from cluster.frontend.json_codec import json_pieces

_KEPT_MAX = 1024
_BYTES_MAX = 64 << 20
"""Of all that is kept, as JSON."""


@dataclass(slots=True)
class Kept:
    """One response and the conversation up to its end."""

    tenant: str
    response: dict[str, Any]
    turns: Sequence[Turn]
    task: asyncio.Task[None] | None = field(default=None)
    """Which answers it, where nobody waits for the answer."""
    size: int = 0


class ResponseStore:
    """The last responses of each key, the oldest of which go first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0

    def put(self, kept: Kept) -> None:
        """In place of what is kept by its id."""
        name = kept.response["id"]
        self.drop(name)
        texts = json_pieces([kept.response, [dict(turn) for turn in kept.turns]])
        kept.size = sum(map(len, texts))
        self._kept[name] = kept
        self._bytes += kept.size
        while len(self._kept) > _KEPT_MAX or self._bytes > _BYTES_MAX:
            self.drop(next(iter(self._kept)))

    def get(self, name: str, tenant: str) -> Kept | None:
        """None where it is not here, or another key's."""
        kept = self._kept.get(name)
        if kept is None or kept.tenant != tenant:
            return None
        self._kept.move_to_end(name)
        return kept

    def drop(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._bytes -= kept.size
