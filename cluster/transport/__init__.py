"""Calls between the processes of one cluster."""

from cluster.transport.credentials import Key
from cluster.transport.endpoint import Endpoint, Server, connect
from cluster.transport.stream import NotEncodable, Stream, StreamKind, StreamLost, encode
