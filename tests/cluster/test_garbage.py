"""Proves that the collector is set to look seldom, and still frees what holds itself."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from cluster.garbage import YOUNG_MOST, collect_seldom

class Loop:
    pass

collect_seldom()
assert gc.get_threshold()[0] == YOUNG_MOST and gc.isenabled()
one = Loop()
one.itself = one
seen = weakref.ref(one)
del one
kept = [[] for _ in range(YOUNG_MOST + 1000)]
print(seen() is None)
"""


def test_what_holds_itself_is_freed_all_the_same() -> None:
    """In a process of its own: the setting is the process's."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "True"
