"""Ports for servers of a test, which are told their port and cannot draw it themselves."""

from __future__ import annotations

import random
import socket

_given: set[int] = set()


def free_port() -> int:
    """A port where nobody listens, and never the same twice.

    Below the range from which the system gives ports to whoever asks for any: of those, Ray's
    processes take dozens between this call and the use of the port.
    """
    while True:
        port = random.randrange(20_000, 30_000)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        _given.add(port)
        return port
