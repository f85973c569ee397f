"""Where the ranks of one replica find each other, and the messages between them.

Rank 0 hosts torch's TCPStore; a process that starts another rank gives it the store's address. The
process group forms through the store, and each further rank has two queues in it: one for what rank
0 tells it, one for its answers. A round trip takes some 0.1 ms on one machine.

Messages are JSON and are read as one known type, so nothing that comes from a socket can run as
code. The store checks no secret, and neither do gloo and NCCL: the network between the ranks must
be the cluster's own. On one machine it is the loopback.
"""

from __future__ import annotations

import functools
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter

Store = Any
"""torch.distributed's; its types name none."""
Address = tuple[str, int]
"""Host and port, where a rank finds rank 0."""
LOOPBACK = "127.0.0.1"
GROUP_TIMEOUT = timedelta(minutes=5)
"""Of the process group: ranks read weights at their own pace before they first meet."""
_PIECE_BYTES = 4 << 20
"""The store takes 8 MiB at once."""
_MORE, _LAST = b"+", b"."


def host_store(host: str = LOOPBACK) -> tuple[Store, Address]:
    """A store in this process, which listens on `host` alone. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            timeout=GROUP_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, (host, port)


def join_store(address: Address) -> Store:
    """The same store for another rank. Raises DistNetworkError."""
    host, port = address
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=False, timeout=GROUP_TIMEOUT
    )


class Channel:
    """One end of the two queues between rank 0 and another rank. Not thread-safe."""

    def __init__(self, store: Store, rank: int, of_rank_0: bool) -> None:
        """`store` is this channel's own connection: a read holds it until a message comes."""
        ends = (f"to/{rank}", f"from/{rank}")
        self._out, self._in = ends if of_rank_0 else ends[::-1]
        self._store = store

    def send(self, message: object) -> None:
        """Returns at once. Raises DistError where the store is gone."""
        kind: Any = type(message)
        body = _codec(kind).dump_json(message)
        pieces = [body[i : i + _PIECE_BYTES] for i in range(0, len(body), _PIECE_BYTES)]
        for piece in pieces[:-1]:
            self._store.queue_push(self._out, _MORE + piece)
        self._store.queue_push(self._out, _LAST + pieces[-1])

    def receive(self, kind: Any, within_s: float) -> Any:
        """The next message, read as a `kind`.

        Raises TimeoutError where none comes in time, DistNetworkError where the store is gone, and
        ValidationError for a message of another kind.
        """
        until_s = time.monotonic() + within_s
        body, mark = b"", _MORE
        while mark == _MORE:
            left_s = max(until_s - time.monotonic(), 0.001)
            self._store.set_timeout(timedelta(seconds=left_s))
            try:
                piece = self._store.queue_pop(self._in)
            except dist.DistStoreError:
                raise TimeoutError(f"no message within {within_s:g} s") from None
            mark, body = piece[:1], body + piece[1:]
        return _codec(kind).validate_json(body)


@functools.cache
def _codec(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
