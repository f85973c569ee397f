"""How speculation went for a request, in the shapes that clients read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from scheduler.messages import Usage


def stats(usage: Usage) -> dict[str, Any]:
    """By position in the draft; what a request asks for."""
    return {
        "num_drafts": usage.drafts,
        "num_draft_tokens": usage.draft_tokens,
        "num_accepted_tokens": usage.accepted_tokens,
        "num_accepted_tokens_per_pos": list(usage.accepted_at),
    }


def steps(usage: Usage) -> dict[str, Any]:
    """In vLLM's shape, which benchmarks read. A step always emits a token besides the accepted."""
    reached = (usage.steps, *usage.accepted_at, 0)
    return {
        "mean_acceptance_length": (usage.steps + usage.accepted_tokens) / usage.steps,
        "draft_acceptance_rate": usage.accepted_tokens / usage.draft_tokens,
        # Entry j: the steps that accepted exactly j tokens.
        "acceptance_histogram": [at_least - more for at_least, more in pairwise(reached)],
        "num_accepted_draft_tokens": usage.accepted_tokens,
        "num_draft_tokens": usage.draft_tokens,
        "num_spec_steps": usage.steps,
    }
