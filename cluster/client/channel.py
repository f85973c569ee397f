"""Where a client's calls go: the options of a channel, TLS, and an address."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    # A gRPC server ends a connection with pings more often than every 300 s without data.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Many streams of one process must not wait for each other on one connection's flow control.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy that is back must be found soon; the pauses between attempts are ours.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


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
