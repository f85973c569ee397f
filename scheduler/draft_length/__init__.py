"""How many tokens a batch drafts, by expected goodput: latency, acceptance, policy."""

from scheduler.draft_length.estimates import CostEstimates, Latency
from scheduler.draft_length.latency import LatencyTable
from scheduler.draft_length.policy import DraftPolicy, StepPlan

__all__ = ["CostEstimates", "DraftPolicy", "Latency", "LatencyTable", "StepPlan"]
