"""Faults that a simulated world draws: of the network, of batches, of replicas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong; probabilities are per batch."""

    delay_s: tuple[float, float] = (0.0005, 0.0015)
    """Least and most time of a message, uniform."""
    duplicate: float = 0.0
    """Probability that a result arrives twice."""
    lose: float = 0.0
    """Probability that a result never arrives."""
    late: float = 0.0
    """Probability that a result arrives only when its replica has been declared lost and has joined
    again."""
    fail: float = 0.0
    """Probability that a batch ends in StepFailed."""
    rows_max: int | None = None
    """Speculate batches with more rows always end in StepFailed, as when memory runs out."""
    deadly: frozenset[str] = frozenset()
    """Requests that kill the replica in every step with them."""
    lease_s: float = 0.5
    """Silence after which a replica is declared lost."""
    rejoin_s: float = 0.5
    """Time from then until it joins again under a new id."""
