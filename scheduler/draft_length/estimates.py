"""What the scheduler believes of a replica, as `status` shows it: times, acceptance, chosen k."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinearCost:
    """fixed_s + token_s * tokens + kv_s * KV positions; no part is negative."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    kv_s: float = 0.0

    def __call__(self, tokens: float, kv: float) -> float:
        return self.fixed_s + self.token_s * tokens + self.kv_s * kv


@dataclass(frozen=True, slots=True)
class Beliefs:
    """What a policy believes of one replica; times in seconds."""

    draft_len: int = 0
    """k as it was chosen last; probes, trials and what requests pin for themselves are left out."""
    verified: float = 1.0
    """Share of the drafted tokens that is verified."""
    steps: int = 1
    """Of the last batch."""
    step_s: float = 0.0
    """Expected time of such a step with the rows of the last batch; 0 while nothing is known."""
    trip_s: float = 0.0
    """What a batch takes beside its run: messages and the pool's own time."""
    acceptance_greedy: float = 0.0
    """Probability that one more draft token is accepted, lately and over all sequences."""
    acceptance_sampled: float = 0.0
    draft: LinearCost = field(default_factory=LinearCost)
    """One draft pass, by rows and KV positions read."""
    verify: LinearCost = field(default_factory=LinearCost)
    """One verification, by tokens and KV positions read."""
    packed: LinearCost = field(default_factory=LinearCost)
    """One that checks some of the draft tokens, by tokens checked and KV positions read."""
    rest: LinearCost = field(default_factory=LinearCost)
    """What of a step is neither, by tokens."""
    apart_positions: float = math.inf
    """See `DraftPolicy.apart`."""
    prefill: LinearCost = field(default_factory=LinearCost)
    """One prefill batch, by positions filled."""
