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
        description="Maximum of rows in a batch (the batch size): sequences that a replica"
        " computes in one step.",
    )
    draft_len: int | None = Field(
        default=None,
        ge=0,
        le=DRAFT_LEN_MAX,
        description="Fixed number of draft tokens per row and step, also the maximum for a"
        " request; 0 turns drafts off. Null: chosen for each batch by measured times and"
        " acceptance rates; 0 is a choice.",
    )
    draft_len_max: int = Field(
        default=8,
        ge=0,
        le=DRAFT_LEN_MAX,
        description="Maximum of draft tokens per row and step, for the scheduler's choice and for"
        " a request's; a request that asks for more gets this number.",
    )
    steps_per_batch_max: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Maximum of steps in one batch while no other row waits; measured times choose"
        " the number.",
    )
    batches_in_flight_max: int = Field(
        default=2,
        ge=1,
        le=8,
        description="Batches that a replica holds at once; 2 hides the round trip.",
    )
    wait_rounds: int = Field(
        default=4,
        ge=1,
        le=1000,
        description="Maximum wait of a resident between two steps, in rounds (batches that hold"
        " all residents once). Larger values give batches of more similar lengths. 1: residents"
        " step in the order in which they became ready.",
    )
    prefill_rows_max: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="Prompts of one prefill batch; at least two while a long prompt is in"
        " progress.",
    )
    prefill_tokens_max: int = Field(
        default=2048,
        ge=1,
        description="Tokens of one prefill batch; a longer prompt takes several, with steps"
        " between them. While rows step, a prefill batch is smaller: about the time of a step.",
    )
    residents_max: int = Field(
        default=256, ge=1, description="Sequences whose KV cache a replica holds at once."
    )
    waiting_requests_max: int = Field(
        default=4096,
        ge=1,
        description="Maximum of waiting requests; further ones are refused.",
    )
    waiting_tokens_max: int = Field(
        default=4_194_304,
        ge=1,
        description="Maximum of tokens in waiting requests (prompt + limit, or prompt + 256"
        " without a limit); further requests are refused.",
    )
    priority_age_s: float = Field(
        default=30.0,
        ge=0,
        description="Waiting time after which a request overtakes the next higher priority class.",
    )
    kv_reserve: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of a sequence's future tokens for which KV blocks are reserved when it"
        " is placed. 1: no sequence is ever preempted for lack of blocks.",
    )
    failures_max: int = Field(
        default=3,
        ge=1,
        description="A request fails after this many failed batches or killed replicas in a row"
        " without a new token.",
    )
    prompt_tokens_max: int = Field(
        default=131072, ge=1, description="Maximum length of a prompt in tokens."
    )
    stop_token_ids_max: int = Field(
        default=64,
        ge=0,
        description="Maximum of stop token ids in a request, not counting the target's own end"
        " tokens.",
    )
    max_logprobs: int = Field(
        default=20,
        ge=-1,
        description="Maximum of log-probabilities that a request may ask for at each token. -1: no"
        " limit, so that a request may ask for -1, the whole vocabulary.",
    )
    timeout_s_max: float = Field(
        default=3600.0, gt=0, description="Longest deadline that a request may set."
    )
