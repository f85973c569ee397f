"""Where the ranks of one replica meet, on one machine or on several.

Rank 0 opens a meeting and tells its address to whoever starts the other ranks; they call there.
From then on orders and answers go over one socket per rank. Beside it stands torch's store, through
which the members of a process group find each other.

Whoever calls must first send the meeting's secret, which rank 0 drew; not until then is anything he
sends read as an object. Like the group's own traffic nothing of it is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

Store = Any
"""torch.distributed's; its types name none."""
LOOPBACK = "127.0.0.1"

_SECRET_BYTES = 32
_RANK = struct.Struct("!H")
_LOOK_S = 0.2
_CALL_S = 30.0
"""What a rank may take to reach rank 0, which is there before any other one is started."""
_SAY_S = 5.0
"""And to send the secret."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds, times: a machine that is gone sends no end, so it is asked."""


class NobodyCame(RuntimeError):
    """A rank never called; the message says which, and why if that is known."""


@dataclass(frozen=True, slots=True)
class Address:
    """What a rank must be told to find the others."""

    host: str
    orders_port: int
    store_port: int
    secret: bytes = field(repr=False)


class Meeting:
    """Rank 0's side; `close` it."""

    def __init__(self, host: str = LOOPBACK, timeout: timedelta = timedelta(minutes=5)) -> None:
        """`host`: an address of this machine that the other ranks reach; nothing else is listened
        on. `timeout` is the store's, for each of its answers. Raises OSError."""
        self._door = _listen(host)
        try:
            with _listen(host) as at_the_store:
                store_port = at_the_store.getsockname()[1]
                self.store: Store | None = dist.TCPStore(  # type: ignore[attr-defined]
                    host,
                    store_port,
                    is_master=True,
                    timeout=timeout,
                    wait_for_workers=False,
                    master_listen_fd=at_the_store.detach(),
                )
        except BaseException:
            self._door.close()
            raise
        orders_port = self._door.getsockname()[1]
        self.address = Address(host, orders_port, store_port, secrets.token_bytes(_SECRET_BYTES))

    def gather(
        self, ranks: int, within_s: float, lost: Callable[[], str | None] = lambda: None
    ) -> list[Connection]:
        """Connections to ranks 1 to `ranks` - 1, in order, once all have called.

        `lost` says why one of them will not, if it is known. Raises NobodyCame.
        """
        until_s = time.monotonic() + within_s
        came: dict[int, Connection] = {}
        self._door.settimeout(_LOOK_S)
        try:
            while missing := sorted(set(range(1, ranks)) - came.keys()):
                if (caller := self._next_caller()) is not None:
                    rank = self._admit(caller)
                    if rank in missing:
                        came[rank] = _connection(caller)
                        continue
                    caller.close()
                if (why := lost()) is not None:
                    raise NobodyCame(why)
                if time.monotonic() > until_s:
                    raise NobodyCame(f"rank {missing[0]} has not come within {within_s:g} s")
        except BaseException:
            for connection in came.values():
                connection.close()
            raise
        return [came[rank] for rank in range(1, ranks)]

    def close(self) -> None:
        """Nobody gets in any more; those who came stay connected."""
        self._door.close()
        self.store = None

    def _next_caller(self) -> socket.socket | None:
        try:
            caller, _ = self._door.accept()
        except TimeoutError:
            return None
        return caller

    def _admit(self, caller: socket.socket) -> int | None:
        """The caller's rank, if he knows the secret."""
        caller.settimeout(_SAY_S)
        said = b""
        try:
            while len(said) < _SECRET_BYTES + _RANK.size:
                more = caller.recv(_SECRET_BYTES + _RANK.size - len(said))
                if not more:
                    return None
                said += more
        except OSError:
            return None
        if not hmac.compare_digest(said[:_SECRET_BYTES], self.address.secret):
            return None
        rank: int = _RANK.unpack(said[_SECRET_BYTES:])[0]
        return rank


def call(address: Address, rank: int) -> Connection:
    """The connection of a rank to rank 0. Raises OSError."""
    caller = socket.create_connection((address.host, address.orders_port), timeout=_CALL_S)
    try:
        caller.sendall(address.secret + _RANK.pack(rank))
        return _connection(caller)
    except BaseException:
        caller.close()
        raise


def store_of(address: Address, timeout: timedelta) -> Store:
    """The store of a meeting, for all ranks but 0."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        address.host, address.store_port, is_master=False, timeout=timeout
    )


def _listen(host: str) -> socket.socket:
    return socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    )


def _connection(peer: socket.socket) -> Connection:
    # An order follows on an answer at once; it must not be held back to fill a packet.
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    peer.settimeout(None)
    return Connection(peer.detach())
