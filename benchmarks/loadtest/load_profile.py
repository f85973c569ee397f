"""The load over time, and the settings of the cluster that follows it. Imports nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple


class Phase(NamedTuple):
    name: str
    from_s: float
    to_s: float


PROFILE = (
    *((0, 0.1), (45, 0.4)),  # a ramp,
    *((45.1, 1.0), (85, 1.0)),  # a burst,
    *((85.1, 0.0), (125, 0.0)),  # nothing,
    *((125.1, 1.0), (205, 1.0)),  # and a longer burst
    *((205.1, 0.0), (206, 0.0)),
)
"""(seconds, share of the peak); straight lines between."""
PHASES = (
    *(Phase("ramp", 0, 45), Phase("burst", 45, 85), Phase("idle", 85, 125)),
    *(Phase("second burst", 125, 205), Phase("end", 205, 370)),
)
SECOND_BURST = PHASES[3]
STEADY = Phase("steady", 165, 205)
"""The second half of that burst: what is wanted is there."""
LOAD_S = PROFILE[-1][0]
END_S = PHASES[-1].to_s
NEW_TOKENS = 96
PROMPT = "The for statement is used to iterate over the elements of a sequence"
AUTOSCALING: dict[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 4,
    "drain_s": 2.0,
    "up_delay_s": 1.0,
    "down_delay_s": 45.0,
    "idle_s": 12.0,
}


def share_at(at_s: float) -> float:
    """Of the peak."""
    for (from_s, start), (to_s, end) in pairwise(PROFILE):
        if at_s < to_s:
            return start + (end - start) * max(0.0, at_s - from_s) / (to_s - from_s)
    return 0.0
