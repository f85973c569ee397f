"""Python's cyclic garbage collector, set for a process that holds very many objects.

It looks at all young objects after every few hundred new ones, and at all old ones now and then. A
pool makes thousands per second that go by their reference count, and keeps hundreds of thousands;
a replica has as many of the libraries that it is built on.
"""

from __future__ import annotations

import gc

YOUNG_MOST = 50_000
"""New objects, less those that went, after which the young ones are looked at."""


def collect_seldom() -> None:
    """Of this process; what there is now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_MOST, 20, 20)
