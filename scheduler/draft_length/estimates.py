"""What the scheduler expects of a replica, as `status` shows it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latency:
    """One row of a latency table: work of about so many tokens, without reading KV."""

    tokens: float
    seconds: float
    """At the machine's usual speed."""


@dataclass(frozen=True, slots=True)
class CostEstimates:
    """What a policy expects of one replica, and chose last; times in seconds."""

    draft_len: int = 0
    """k as it was chosen last; probes and what requests ask for themselves are left out."""
    steps: int = 1
    """Of the last batch."""
    step_s: float = 0.0
    """Expected time of such a step with the rows of the last batch; 0 while nothing is known."""
    round_trip_s: float = 0.0
    """What a batch takes beside its run: messages and the pool's own time."""
    acceptance_greedy: float = 0.0
    """Probability that one more draft token is accepted, lately and over all sequences."""
    acceptance_sampled: float = 0.0
    apart_positions: float = math.inf
    """See `DraftPolicy.apart`."""
    slowdown: float = 1.0
    """What steps take now over what they take usually."""
    draft: tuple[Latency, ...] = ()
    """One draft pass, by rows."""
    step: tuple[Latency, ...] = ()
    """The rest of a step, by tokens checked."""
    prefill: tuple[Latency, ...] = ()
    """One prefill batch, by positions filled."""
