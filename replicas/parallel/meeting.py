"""Where the ranks of one replica meet, on one machine or on several.

Rank 0 opens a meeting and tells its address to whoever starts the other ranks; they call there.
From then on batches and answers go over one socket per rank, pickled. Before anything is unpickled
each side proves to the other that it knows the meeting's secret, which rank 0 drew and which itself
never goes over the socket.

The handshake: 32 random bytes of rank 0; 32 random bytes of the caller, its rank and its proof; the
proof of rank 0. A proof is the HMAC-SHA256 under the secret of the side's name and all of that
(challenge and response as in ISO/IEC 9798-4), so neither an old proof nor the other side's own is
of any use.

Beside it stands torch's store, through which the members of a process group find each other. It
asks nobody for a secret, nor do the sums of gloo and NCCL, and nothing of all this is encrypted:
the network between the ranks must be one's own. On one machine it is the loopback.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

Store = Any
"""torch.distributed's; its types name none."""
LOOPBACK = "127.0.0.1"

_SECRET_BYTES = _NONCE_BYTES = _PROOF_BYTES = 32
_RANK = struct.Struct("!H")
_RANK_0, _CALLER = b"lockstep ranks: rank 0", b"lockstep ranks: the caller"
_LOOK_S = 0.2
_CALL_S = 30.0
"""What a rank may take to reach rank 0, which is there before any other one is started."""
_PROOF_S = 2.0
"""Whoever has not proved by then that he knows the secret is hung up on; others wait behind him."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds, times: a machine that is gone sends no end, so it is asked."""
_UNHEARD_MS = 25_000
"""It is not asked while something that was sent is not confirmed; so long that may last."""


class NobodyCame(RuntimeError):
    """A rank never called; the message says which, and why if that is known."""


@dataclass(frozen=True, slots=True)
class Address:
    """What a rank must be told to find the others."""

    host: str
    batches_port: int
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
                self.store: Store = dist.TCPStore(  # type: ignore[attr-defined]
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
        batches_port = self._door.getsockname()[1]
        self.address = Address(host, batches_port, store_port, secrets.token_bytes(_SECRET_BYTES))

    def gather(
        self,
        ranks: int,
        within_s: float,
        lost: Callable[[Sequence[int]], str | None] = lambda missing: None,
    ) -> list[Connection]:
        """Connections to ranks 1 to `ranks` - 1, in order, once all have called.

        `lost` says why one of those that are missing will not come, if it is known. Raises
        NobodyCame.
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
                if (why := lost(missing)) is not None:
                    raise NobodyCame(why)
                if time.monotonic() > until_s:
                    raise NobodyCame(f"rank {missing[0]} has not come within {within_s:g} s")
        except BaseException:
            for connection in came.values():
                connection.close()
            raise
        return [came[rank] for rank in range(1, ranks)]

    def close(self) -> None:
        """Nobody gets in any more; those who came stay connected, and a group keeps the store."""
        self._door.close()
        self.store = None

    def _next_caller(self) -> socket.socket | None:
        try:
            caller, _ = self._door.accept()
        except TimeoutError:
            return None
        return caller

    def _admit(self, caller: socket.socket) -> int | None:
        """The caller's rank, if he knows the secret; he is told that we do."""
        secret = self.address.secret
        until_s = time.monotonic() + _PROOF_S
        ours = secrets.token_bytes(_NONCE_BYTES)
        try:
            _send(caller, ours, until_s)
            said = _receive(caller, _NONCE_BYTES + _RANK.size, until_s)
            proof = _receive(caller, _PROOF_BYTES, until_s)
            if not hmac.compare_digest(proof, _proof(secret, _CALLER, ours + said)):
                return None
            _send(caller, _proof(secret, _RANK_0, ours + said), until_s)
        except OSError:
            return None
        rank: int = _RANK.unpack(said[_NONCE_BYTES:])[0]
        return rank


def call(address: Address, rank: int) -> Connection:
    """The connection of a rank to rank 0. Raises OSError."""
    until_s = time.monotonic() + _CALL_S
    rank_0 = socket.create_connection((address.host, address.batches_port), timeout=_CALL_S)
    try:
        theirs = _receive(rank_0, _NONCE_BYTES, until_s)
        said = secrets.token_bytes(_NONCE_BYTES) + _RANK.pack(rank)
        _send(rank_0, said + _proof(address.secret, _CALLER, theirs + said), until_s)
        proof = _receive(rank_0, _PROOF_BYTES, until_s)
        if not hmac.compare_digest(proof, _proof(address.secret, _RANK_0, theirs + said)):
            raise ConnectionRefusedError("whoever answers does not know the secret of the meeting")
        return _connection(rank_0)
    except BaseException:
        rank_0.close()
        raise


def _proof(secret: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, side + said, "sha256")


def _send(peer: socket.socket, data: bytes, until_s: float) -> None:
    peer.settimeout(_left_s(until_s))
    peer.sendall(data)


def _receive(peer: socket.socket, size: int, until_s: float) -> bytes:
    """So many bytes; raises OSError where they have not come by then."""
    data = b""
    while len(data) < size:
        peer.settimeout(_left_s(until_s))
        more = peer.recv(size - len(data))
        if not more:
            raise ConnectionResetError("hung up in the handshake")
        data += more
    return data


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0.0:
        raise TimeoutError("the handshake takes too long")
    return left_s


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
    # A batch follows on an answer at once; it must not be held back to fill a packet.
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)
    peer.settimeout(None)
    return Connection(peer.detach())
