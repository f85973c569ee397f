"""The one table of metrics: docs/metrics.md is made of it, dashboards are checked against it.

A metric has our name and, where vLLM has one with the same meaning, that one as well: boards and
load tools that people have read it. At `/metrics` vLLM's names are as its own server writes them
(`vllm:...`); Ray takes no colon, so there they are `ray_vllm_...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Bounds of what takes about as long as a step."""
_ANSWER_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of what takes as long as a wait or an answer."""
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Metric(NamedTuple):
    """One metric; a counter is exported with `_total` behind its name, by Ray with `ray_` before
    it."""

    kind: str
    """Name of the class in `ray.util.metrics`."""
    help: str
    tags: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Of a histogram: the upper ones of its buckets, in the metric's unit."""
    vllm: tuple[str, ...] = ()
    """Names of the same figure in vLLM, without `vllm:`."""
    vllm_tags: tuple[str, ...] = ()
    """What the tags are called there, where they are called otherwise."""


METRICS: Mapping[str, Metric] = {
    "lockstep_tokens_committed": Metric(
        "Counter", "Tokens committed by the pool.", vllm=("generation_tokens",)
    ),
    "lockstep_requests_finished": Metric(
        "Counter",
        "Requests finished, by reason.",
        ("reason",),
        vllm=("request_success",),
        vllm_tags=("finished_reason",),
    ),
    "lockstep_prompt_tokens": Metric(
        "Counter",
        "Prompt tokens of finished requests.",
        vllm=("prompt_tokens", "prefix_cache_queries"),
    ),
    "lockstep_cached_tokens": Metric(
        "Counter",
        "Prompt tokens of finished requests that were found in the prefix cache.",
        vllm=("prefix_cache_hits",),
    ),
    "lockstep_requests_recovered": Metric(
        "Counter", "Times that a request lost its replica and was prefilled again."
    ),
    "lockstep_sequences_preempted": Metric(
        "Counter",
        "Sequences sent back to waiting because KV blocks ran out.",
        vllm=("num_preemptions",),
    ),
    "lockstep_sequences_moved": Metric(
        "Counter", "Sequences moved to a replica with fewer sequences."
    ),
    "lockstep_drafts": Metric(
        "Counter",
        "Steps with draft tokens, counted per row, of finished requests.",
        vllm=("spec_decode_num_drafts",),
    ),
    "lockstep_draft_tokens": Metric(
        "Counter",
        "Draft tokens of finished requests.",
        vllm=("spec_decode_num_draft_tokens",),
    ),
    "lockstep_accepted_tokens": Metric(
        "Counter",
        "Accepted tokens of finished requests.",
        vllm=("spec_decode_num_accepted_tokens",),
    ),
    "lockstep_accepted_tokens_at": Metric(
        "Counter",
        "Accepted tokens of finished requests, by their position in the draft, from 0.",
        ("position",),
        vllm=("spec_decode_num_accepted_tokens_per_pos",),
    ),
    "lockstep_waiting_requests": Metric(
        "Gauge", "Requests that wait for a replica.", vllm=("num_requests_waiting",)
    ),
    "lockstep_waiting_tokens": Metric(
        "Gauge", "Prompt and maximum new tokens of the requests that wait."
    ),
    "lockstep_outstanding_tokens": Metric(
        "Gauge", "Tokens that admitted requests are still expected to commit."
    ),
    "lockstep_running_requests": Metric(
        "Gauge", "Requests that are on a replica.", vllm=("num_requests_running",)
    ),
    "lockstep_replicas": Metric("Gauge", "Replicas that have joined the pool and take sequences."),
    "lockstep_kv_blocks": Metric("Gauge", "KV blocks of all replicas."),
    "lockstep_kv_blocks_free": Metric("Gauge", "Free KV blocks of all replicas."),
    "lockstep_kv_usage": Metric(
        "Gauge",
        "Reserved share of the KV blocks, from 0 to 1.",
        vllm=("kv_cache_usage_perc",),
    ),
    "lockstep_acceptance": Metric(
        "Gauge",
        "Accepted share of the present replicas' draft tokens; those behind a rejected one count.",
    ),
    "lockstep_batch_spread": Metric(
        "Gauge", "Longest minus shortest row of a batch, mean over the present replicas."
    ),
    "lockstep_queue_seconds": Metric(
        "Histogram",
        "From the admission of a request by the pool to its first replica.",
        bounds=_ANSWER_S,
        vllm=("request_queue_time_seconds",),
    ),
    "lockstep_request_prompt_tokens": Metric(
        "Histogram",
        "Prompt tokens of a finished request.",
        bounds=_TOKENS,
        vllm=("request_prompt_tokens",),
    ),
    "lockstep_request_new_tokens": Metric(
        "Histogram",
        "New tokens of a finished request.",
        bounds=_TOKENS,
        vllm=("request_generation_tokens",),
    ),
    "lockstep_first_token_seconds": Metric(
        "Histogram",
        "From a request's arrival to its first token.",
        bounds=_ANSWER_S,
        vllm=("time_to_first_token_seconds",),
    ),
    "lockstep_token_seconds": Metric(
        "Histogram",
        "Seconds per token between two token updates of a request, once for each update.",
        bounds=_STEP_S,
        vllm=("inter_token_latency_seconds", "time_per_output_token_seconds"),
    ),
    "lockstep_request_seconds": Metric(
        "Histogram",
        "From a request's arrival to its end, by status code.",
        ("status",),
        bounds=_ANSWER_S,
        vllm=("e2e_request_latency_seconds",),
    ),
    "lockstep_audited_requests": Metric(
        "Counter", "Audited requests: finished requests that the target alone decoded again."
    ),
    "lockstep_audited_tokens": Metric("Counter", "Tokens of audited requests that were compared."),
    "lockstep_audit_mismatches": Metric(
        "Counter", "Audited requests whose output was not the target's. Any is a fault."
    ),
    "lockstep_calls_refused": Metric(
        "Counter", "Calls refused by a frontend or the pool, by status code.", ("status",)
    ),
    "lockstep_streamed_chunks": Metric("Counter", "Chunks sent to streaming clients."),
}
