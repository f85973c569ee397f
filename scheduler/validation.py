"""What no replica could ever serve is refused at the door, with the field that is wrong.

Pure and without state, so that a frontend asks the same question before it submits.
"""

from __future__ import annotations

import math

from scheduler.config import DRAFT_LEN_MAX, SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.errors import InvalidRequest
from scheduler.messages import ReplicaSpec, Request, SamplingParams

SEED_MAX = 2**63
"""Seeds are in [0, SEED_MAX)."""

PENALTY_MAX = 2.0
BIAS_MAX = 100.0
LOGIT_BIAS_MAX = 1024
"""Tokens that one request may bias."""
LOGPROBS_MAX = 20
"""Likeliest tokens that a request may be told in one place."""

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
    if request.decoding is not None:
        _check_decoding(request.decoding, request.max_new_tokens, spec)
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


def _check_decoding(decoding: Decoding, max_new_tokens: int, spec: ReplicaSpec | None) -> None:
    for name, value, most in (
        ("frequency_penalty", decoding.frequency_penalty, PENALTY_MAX),
        ("presence_penalty", decoding.presence_penalty, PENALTY_MAX),
    ):
        if not abs(value) <= most:
            raise InvalidRequest(name, f"must be in [{-most:g}, {most:g}], is {value}")
    factor = decoding.repetition_penalty
    if not (math.isfinite(factor) and factor > 0):
        raise InvalidRequest("repetition_penalty", f"must be finite and above 0, is {factor}")
    if len(decoding.logit_bias) > LOGIT_BIAS_MAX:
        raise InvalidRequest(
            "logit_bias", f"{len(decoding.logit_bias)} given, at most {LOGIT_BIAS_MAX} allowed"
        )
    for token, bias in decoding.logit_bias:
        if not abs(bias) <= BIAS_MAX:
            raise InvalidRequest(
                "logit_bias", f"must be in [{-BIAS_MAX:g}, {BIAS_MAX:g}], is {bias} of {token}"
            )
    for name, count in (
        ("logprobs", decoding.logprobs),
        ("prompt_logprobs", decoding.prompt_logprobs),
    ):
        if count is not None and not 0 <= count <= LOGPROBS_MAX:
            raise InvalidRequest(name, f"must be in [0, {LOGPROBS_MAX}], is {count}")
    if not 0 <= decoding.min_tokens <= max_new_tokens:
        raise InvalidRequest(
            "min_tokens", f"must be in [0, max_new_tokens], is {decoding.min_tokens}"
        )
    if decoding.grammar and (decoding.min_tokens or decoding.bad_words):
        name = "min_tokens" if decoding.min_tokens else "bad_words"
        raise InvalidRequest(name, "not together with a grammar, which may leave no other token")
    if spec is not None:
        ids = tuple(token for token, _ in decoding.logit_bias)
        _check_vocabulary("logit_bias", ids, spec.vocab_size)


def _check_vocabulary(field: str, tokens: tuple[int, ...], vocab_size: int) -> None:
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return
    wrong = next(token for token in tokens if not 0 <= token < vocab_size)
    raise InvalidRequest(field, f"token id {wrong} is outside the vocabulary of {vocab_size}")
