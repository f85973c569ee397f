"""Where a client's calls go: channels with or without TLS, the key, and which address is in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from cluster.client.retry import Attempts, OutOfTime, RetryPolicy, broke, retry_after_s
from protos import lockstep_pb2 as pb
from protos import lockstep_pb2_grpc

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    # A gRPC server hangs up on whoever pings more often than every 300 s without data.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Many streams of one process must not wait for each other on one connection's flow control.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy that is back must be found soon; the pauses between attempts are ours.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_OWN_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
)
"""What a client's own gRPC says without any server; all others tell of one."""
C = TypeVar("C")


@dataclass(frozen=True)
class Tls:
    """Files in PEM. Without `ca` the server's certificate is checked against gRPC's own roots."""

    ca: Path | str | None = None
    cert: Path | str | None = None
    """The client's own certificate, for a server that asks for one; with `key`."""
    key: Path | str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError for a file that cannot be read, ValueError for half of a pair."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert: a client certificate and its key belong together")
        ca, key, cert = (
            None if path is None else Path(path).read_bytes()
            for path in (self.ca, self.key, self.cert)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)


@dataclass(frozen=True)
class Server:
    """How the command line reaches a server."""

    address: str
    api_key: str | None = field(default=None, repr=False)
    tls: Tls | None = None


class Lane(Generic[C]):
    """One address."""

    def __init__(self, channel: C) -> None:
        """`channel`: blocking or of grpc.aio."""
        self.channel = channel
        self.stub: Any = lockstep_pb2_grpc.LockstepStub(channel)  # type: ignore[no-untyped-call]
        self.health: Any = health_pb2_grpc.HealthStub(channel)


class Lanes(Generic[C]):
    """The addresses; the one in use is kept until it fails. What both clients share."""

    def __init__(
        self,
        open_channel: Callable[[str], C],
        address: str | Sequence[str],
        api_key: str | None,
        retry: RetryPolicy,
    ) -> None:
        addresses = [address] if isinstance(address, str) else list(address)
        if not addresses:
            raise ValueError("address: at least one is needed")
        self._lanes = [Lane(open_channel(each)) for each in addresses]
        self._index = 0
        self.retry = retry
        # Never in a log or a message: only here and on the wire.
        self.metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self.reached = False
        """Whether any server has ever answered."""
        self.retries = 0
        """How often a call was asked again."""

    def __iter__(self) -> Iterator[Lane[C]]:
        """All of them, the one in use first."""
        first = self._index
        return iter(self._lanes[first:] + self._lanes[:first])

    @property
    def current(self) -> Lane[C]:
        return self._lanes[self._index]

    def attempts(self, request: pb.GenerateRequest, timeout_s: float | None) -> Attempts:
        own_s = request.timeout_s if request.HasField("timeout_s") else None
        return Attempts(self.retry, time.monotonic(), (timeout_s, own_s))

    def pause_s(
        self, lane: Lane[C], attempts: Attempts, error: grpc.RpcError, streaming: bool
    ) -> float:
        """Before the next attempt, which goes to the next address. Raises the error if none is
        to be made, or OutOfTime where only the call's own time forbids it."""
        now_s = time.monotonic()
        said = error.code() not in _OWN_CODES or retry_after_s(error) is not None
        self.reached = self.reached or said or attempts.served(now_s)
        pause_s = attempts.pause_s(error, now_s, streaming=streaming, reached=self.reached)
        if pause_s is None:
            if attempts.is_over(now_s) and broke(error, streaming):
                raise OutOfTime(error) from error
            raise error
        self.retries += 1
        # Another call may have moved on already.
        if self.current is lane:
            self._index = (self._index + 1) % len(self._lanes)
        return pause_s


def left_s(attempts: Attempts, timeout_s: float | None) -> float | None:
    """What the caller's own bound leaves for the next attempt."""
    if timeout_s is None:
        return None
    return max(timeout_s - attempts.passed_s(time.monotonic()), 0.001)
