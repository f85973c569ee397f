"""Settings of the pure core, frozen and validated; an unknown key is an error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

DRAFT_LEN_MAX = 32
"""Most draft tokens per row and step that a config or a request may ask for."""

PREFILL_TOKENS_LEAST = 32
"""Positions of a chunk at least: below it, messages cost more than what is filled."""


class SchedulerConfig(BaseModel):
    """How the pool batches, places and bounds. Lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows_max: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="Rows of a batch (the batch size): sequences that one step of a replica"
        " computes; more wait for their turn.",
    )
    draft_len: int | None = Field(
        default=None,
        ge=0,
        le=DRAFT_LEN_MAX,
        description="Draft tokens per row and step, and most that a request gets; 0 is off."
        " null: chosen for each batch by measured times and acceptance, 0 included.",
    )
    draft_len_max: int = Field(
        default=8,
        ge=0,
        le=DRAFT_LEN_MAX,
        description="Most draft tokens per row and step that are chosen, or that a request may"
        " choose for itself; a request that asks for more gets so many.",
    )
    steps_per_batch_max: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Steps of one batch where no other row waits; how many is chosen by measured"
        " times.",
    )
    batches_in_flight_max: int = Field(
        default=2,
        ge=1,
        le=8,
        description="Batches a replica holds at once; 2 hides the round trip.",
    )
    wait_rounds: int = Field(
        default=4,
        ge=1,
        le=1000,
        description="Rounds (batches that hold all residents once) that a resident waits at most"
        " between two steps; the more, the less its length differs from its batch's. 1: residents"
        " step in order of arrival.",
    )
    prefill_rows_max: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="Prompts of one prefill batch; two at least while a long one is being filled.",
    )
    prefill_tokens_max: int = Field(
        default=2048,
        ge=1,
        description="Tokens of one prefill batch; a longer prompt is filled over several, with "
        "decode batches between them. While rows step it is less: what takes the time of a step or "
        "so, by measured times.",
    )
    residents_max: int = Field(
        default=256, ge=1, description="Sequences whose KV cache a replica holds at once."
    )
    waiting_requests_max: int = Field(
        default=4096,
        ge=1,
        description="Requests that wait for a replica; beyond it they are refused.",
    )
    waiting_tokens_max: int = Field(
        default=4_194_304,
        ge=1,
        description="Tokens (prompt and limit, or 256 where a request sets no limit) of the "
        "requests that wait; beyond it they are "
        "refused.",
    )
    priority_age_s: float = Field(
        default=30.0,
        ge=0,
        description="Waiting by which a request overtakes the next higher priority class.",
    )
    kv_reserve: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of a sequence's tokens to come for which KV blocks are set aside when "
        "it is placed. 1: none is ever sent back for want of blocks.",
    )
    failures_max: int = Field(
        default=3,
        ge=1,
        description="Failed batches, or replicas killed, in a row and without a new token, that "
        "fail a request.",
    )
    prompt_tokens_max: int = Field(default=131072, ge=1, description="Longest prompt accepted.")
    stop_token_ids_max: int = Field(
        default=64,
        ge=0,
        description="Stop token ids of a request, beside the target's own end tokens.",
    )
    timeout_s_max: float = Field(default=3600.0, gt=0, description="Longest deadline accepted.")
