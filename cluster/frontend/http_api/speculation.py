"""What a request cost and how speculation went for it, in the shapes that clients read."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from cluster.frontend.calls import SequenceEnd
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


def times(end: SequenceEnd) -> dict[str, Any]:
    """In vLLM's shape."""
    new, writing_s = end.completion_tokens, max(end.total_s - end.first_token_s, 0.0)
    times = {
        "time_to_first_token_ms": end.first_token_s * 1e3,
        "generation_time_ms": writing_s * 1e3,
        "queue_time_ms": end.usage.queued_s * 1e3,
        "tokens_per_second": new / end.total_s if end.total_s > 0 else 0.0,
    }
    return times | ({"mean_itl_ms": writing_s * 1e3 / (new - 1)} if new > 1 else {})


def usage(ends: Mapping[int, SequenceEnd], choices: int) -> dict[str, Any]:
    """A prompt counts once, however many choices it has."""
    new = sum(end.completion_tokens for end in ends.values())
    prompts = [end for index, end in ends.items() if index % choices == 0]
    given = sum(end.prompt_tokens for end in prompts)
    drafted = sum(end.usage.draft_tokens for end in ends.values())
    accepted = sum(end.usage.accepted_tokens for end in ends.values())
    thought = sum(end.reasoning_tokens for end in ends.values())
    return {
        "prompt_tokens": given,
        "completion_tokens": new,
        "total_tokens": given + new,
        "reasoning_tokens": thought,  # SGLang's place
        "prompt_tokens_details": {"cached_tokens": sum(end.usage.cached_tokens for end in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": thought,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }
