"""How many tokens a batch drafts, by expected goodput: latency, acceptance, policy."""

from scheduler.draft_length.latency import LatencyTable
from scheduler.draft_length.policy import CostEstimates, DraftPolicy, StepPlan
