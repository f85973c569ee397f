"""What no replica could ever serve is refused at the door, with the field that is wrong.

Pure and without state, so that a frontend asks the same question before it submits.
"""

from __future__ import annotations

import math

from scheduler.config import DRAFT_LEN_MAX, SchedulerConfig
from scheduler.errors import InvalidRequest
from scheduler.messages import ReplicaSpec, Request, SamplingParams

SEED_MAX = 2**63
"""Seeds are in [0, SEED_MAX)."""

END_TOKENS_MAX = 16
"""Of the target's own, which a frontend adds to the stop tokens that a client may give."""


def check_request(
    request: Request, config: SchedulerConfig, spec: ReplicaSpec | None = None
) -> None:
    """Raises InvalidRequest(field, reason) for a request that can never be served as asked.

    Without a spec (no replica is known yet) vocabulary, context and KV blocks go unchecked.
    """
    if not request.id:
        raise InvalidRequest("id", "must not be empty")
    _check_lengths(request, config)
    _check_sampling(request.sampling)
    stops_most = config.stop_token_ids_max + END_TOKENS_MAX
    if len(request.stop_token_ids) > stops_most:
        raise InvalidRequest(
            "stop_token_ids", f"{len(request.stop_token_ids)} given, at most {stops_most} allowed"
        )
    if request.draft_len is not None and not 0 <= request.draft_len <= DRAFT_LEN_MAX:
        raise InvalidRequest(
            "draft_len", f"must be in [0, {DRAFT_LEN_MAX}], is {request.draft_len}"
        )
    if request.timeout_s is not None:
        # Written so that NaN fails too.
        if not request.timeout_s > 0:
            raise InvalidRequest("timeout_s", f"must be positive, is {request.timeout_s}")
        if request.timeout_s > config.timeout_s_max:
            raise InvalidRequest(
                "timeout_s", f"must be at most {config.timeout_s_max}, is {request.timeout_s}"
            )
    if spec is not None:
        if request.length_max > spec.length_max:
            raise InvalidRequest(
                "max_new_tokens",
                f"prompt ({len(request.prompt)}) + max_new_tokens ({request.max_new_tokens}) "
                f"exceed the {spec.length_max} tokens that a replica can hold",
            )
        _check_vocabulary("prompt", request.prompt, spec.vocab_size)
        _check_vocabulary("committed", request.committed, max(spec.vocab_size, spec.embedding_size))
        _check_vocabulary("stop_token_ids", request.stop_token_ids, spec.vocab_size)


def blocks_needed(length: int, block_size: int) -> int:
    """KV blocks for a content of `length` tokens."""
    return -(-length // block_size)


def _check_lengths(request: Request, config: SchedulerConfig) -> None:
    if not request.prompt:
        raise InvalidRequest("prompt", "must have at least one token")
    if len(request.prompt) > config.prompt_tokens_max:
        raise InvalidRequest(
            "prompt",
            f"{len(request.prompt)} tokens, at most {config.prompt_tokens_max} allowed",
        )
    if request.max_new_tokens < 1:
        raise InvalidRequest("max_new_tokens", f"must be at least 1, is {request.max_new_tokens}")
    if len(request.committed) > request.max_new_tokens:
        raise InvalidRequest(
            "committed",
            f"{len(request.committed)} tokens exceed max_new_tokens ({request.max_new_tokens})",
        )


def _check_sampling(sampling: SamplingParams) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequest(
            "temperature", f"must be finite and at least 0, is {sampling.temperature}"
        )
    if sampling.top_k < 0:
        raise InvalidRequest("top_k", f"must be at least 0 (0 keeps all), is {sampling.top_k}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("top_p", f"must be in (0, 1], is {sampling.top_p}")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest("min_p", f"must be in [0, 1], is {sampling.min_p}")
    if not 0 <= sampling.seed < SEED_MAX:
        raise InvalidRequest("seed", f"must be in [0, 2**63), is {sampling.seed}")


def _check_vocabulary(field: str, tokens: tuple[int, ...], vocab_size: int) -> None:
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return
    wrong = next(token for token in tokens if not 0 <= token < vocab_size)
    raise InvalidRequest(field, f"token id {wrong} is outside the vocabulary of {vocab_size}")
