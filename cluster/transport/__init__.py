"""Calls between the processes of one cluster."""

from cluster.transport.codec import Messages, NotEncodable, encode
from cluster.transport.credentials import Key
from cluster.transport.endpoint import Endpoint, Server, connect
from cluster.transport.stream import Stream, StreamKind, StreamLost

__all__ = [
    "Endpoint",
    "Key",
    "Messages",
    "NotEncodable",
    "Server",
    "Stream",
    "StreamKind",
    "StreamLost",
    "connect",
    "encode",
]
