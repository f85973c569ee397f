"""What no replica could ever serve is refused at the door, with the field that is wrong.

Pure and without state, so that a frontend asks the same question before it submits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from scheduler.config import DRAFT_LEN_MAX, SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.errors import InvalidRequest
from scheduler.messages import ReplicaSpec, Request, Sampling

SEED_MAX = 2**63
"""Seeds are in [0, SEED_MAX)."""

TEMPERATURE_MAX = 1e6
TOP_K_MAX = 2**31 - 1
"""As large as any vocabulary: what is computed with it has no more bits."""
PENALTY_MAX = 2.0
BIAS_MAX = 100.0
LOGIT_BIAS_MAX = 1024
"""Tokens that one request may bias."""
LOGPROB_IDS_MAX = 128
"""Tokens of its own choice that it may be told of in one place."""

END_TOKENS_MAX = 16
"""Of the target's own, which a frontend adds to the stop tokens that a client may give."""


Objections = Iterator[tuple[str, str]]
"""(field, what is wrong with it)."""


def check_request(
    request: Request, config: SchedulerConfig, spec: ReplicaSpec | None = None
) -> None:
    """Raises InvalidRequest(field, reason) for a request that can never be served as asked.

    Without a spec (no replica is known yet) vocabulary, context and KV blocks go unchecked.
    """
    for field, reason in _objections(request, config, spec):
        raise InvalidRequest(field, reason)


def blocks_needed(length: int, block_size: int) -> int:
    """KV blocks for a content of `length` tokens."""
    return -(-length // block_size)


def _objections(request: Request, config: SchedulerConfig, spec: ReplicaSpec | None) -> Objections:
    if not request.id:
        yield "id", "must not be empty"
    yield from _lengths(request, config)
    yield from _sampling(request.sampling)
    stops, stops_most = len(request.stop_token_ids), config.stop_token_ids_max + END_TOKENS_MAX
    if stops > stops_most:
        yield "stop_token_ids", f"{stops} given, at most {stops_most} allowed"
    if request.decoding is not None:
        yield from _decoding(request.decoding, request, spec)
        yield from _logprobs(request.decoding, config.max_logprobs, spec)
    if request.draft_len is not None and not 0 <= request.draft_len <= DRAFT_LEN_MAX:
        yield "draft_len", f"must be in [0, {DRAFT_LEN_MAX}], is {request.draft_len}"
    if request.timeout_s is not None:
        # Written so that NaN fails too.
        if not request.timeout_s > 0:
            yield "timeout_s", f"must be positive, is {request.timeout_s}"
        if request.timeout_s > config.timeout_s_max:
            yield "timeout_s", f"must be at most {config.timeout_s_max}, is {request.timeout_s}"
    if spec is not None:
        if request.length_max > spec.length_max:
            yield (
                "max_new_tokens",
                f"prompt ({len(request.prompt)}) + max_new_tokens ({request.max_new_tokens}) "
                f"exceed the {spec.length_max} tokens that a replica can hold",
            )
        embedded = spec.logits_size
        yield from _vocabulary("prompt", request.prompt, spec.vocab_size)
        yield from _vocabulary("committed", request.committed, embedded)
        yield from _vocabulary("stop_token_ids", request.stop_token_ids, spec.vocab_size)


def _lengths(request: Request, config: SchedulerConfig) -> Objections:
    prompt, new, most = len(request.prompt), request.max_new_tokens, config.prompt_tokens_max
    if not prompt:
        yield "prompt", "must have at least one token"
    if prompt > most:
        yield "prompt", f"{prompt} tokens, at most {most} allowed"
    if new < 1:
        yield "max_new_tokens", f"must be at least 1, is {new}"
    if len(request.committed) > new:
        yield "committed", f"{len(request.committed)} tokens exceed max_new_tokens ({new})"


def _sampling(sampling: Sampling) -> Objections:
    temperature = sampling.temperature
    if not 0 <= temperature <= TEMPERATURE_MAX:
        yield "temperature", f"must be in [0, {TEMPERATURE_MAX:g}], is {temperature}"
    if not 0 <= sampling.top_k <= TOP_K_MAX:
        yield "top_k", f"must be in [0, 2**31), where 0 keeps all, is {sampling.top_k}"
    if not 0 < sampling.top_p <= 1:
        yield "top_p", f"must be in (0, 1], is {sampling.top_p}"
    if not 0 <= sampling.min_p <= 1:
        yield "min_p", f"must be in [0, 1], is {sampling.min_p}"
    if not 0 <= sampling.seed < SEED_MAX:
        yield "seed", f"must be in [0, 2**63), is {sampling.seed}"


def _decoding(decoding: Decoding, request: Request, spec: ReplicaSpec | None) -> Objections:
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(decoding, name)
        if not abs(value) <= PENALTY_MAX:
            yield name, f"must be in [{-PENALTY_MAX:g}, {PENALTY_MAX:g}], is {value}"
    factor = decoding.repetition_penalty
    if not (math.isfinite(factor) and factor > 0):
        yield "repetition_penalty", f"must be finite and above 0, is {factor}"
    biases = decoding.logit_bias
    if len(biases) > LOGIT_BIAS_MAX:
        yield "logit_bias", f"{len(biases)} given, at most {LOGIT_BIAS_MAX} allowed"
    for token, bias in biases:
        if not abs(bias) <= BIAS_MAX:
            yield "logit_bias", f"must be in [{-BIAS_MAX:g}, {BIAS_MAX:g}], is {bias} of {token}"
    if not 0 <= decoding.min_tokens <= request.max_new_tokens:
        yield "min_tokens", f"must be in [0, max_new_tokens], is {decoding.min_tokens}"
    if decoding.grammar and (decoding.min_tokens or decoding.bad_words):
        name = "min_tokens" if decoding.min_tokens else "bad_words"
        yield name, "not together with a grammar, which may leave no other token"
    if (allowed := decoding.allowed_token_ids) and (decoding.grammar or decoding.bad_words):
        yield "allowed_token_ids", "not together with a grammar or bad_words: no token may be left"
    if allowed and decoding.min_tokens and set(allowed) <= set(request.stop_token_ids):
        yield "allowed_token_ids", "all of them end the text, which min_tokens forbids"
    if spec is not None:
        embedded = spec.logits_size
        yield from _vocabulary("allowed_token_ids", allowed, spec.vocab_size)
        yield from _vocabulary("logit_bias", [token for token, _ in biases], spec.vocab_size)
        words = [token for word in decoding.bad_words for token in word]
        yield from _vocabulary("bad_words", words, embedded)


def _logprobs(decoding: Decoding, most: int, spec: ReplicaSpec | None) -> Objections:
    """`most`: the setting; -1 asks for all tokens, and sets no limit."""
    every = math.inf if spec is None else spec.logits_size
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(decoding, name)) is None:
            continue
        if most == -1:
            if count < -1:
                yield name, f"must be at least 0, or -1 for the whole vocabulary, is {count}"
        elif not 0 <= (every if count == -1 else count) <= most:
            yield name, f"must be in [0, {most}], is {count} (the server sets max_logprobs)"
    named = decoding.logprob_token_ids
    if len(named) > LOGPROB_IDS_MAX:
        yield "logprob_token_ids", f"{len(named)} given, at most {LOGPROB_IDS_MAX} allowed"
    if named and decoding.logprobs is None:
        yield "logprob_token_ids", "only with logprobs"
    if spec is not None:
        yield from _vocabulary("logprob_token_ids", named, spec.vocab_size)


def _vocabulary(field: str, tokens: Sequence[int], vocab_size: int) -> Objections:
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return
    wrong = next(token for token in tokens if not 0 <= token < vocab_size)
    yield field, f"token id {wrong} is out of vocabulary, which has {vocab_size}"
