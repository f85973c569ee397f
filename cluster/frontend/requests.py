"""What a call asks of the pool: one request for each of its sequences."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import replace

from cluster.config import ClusterConfig
from cluster.frontend.calls import GenerateCall
from cluster.frontend.prompts import ChatPrompt
from cluster.frontend.target_text import TargetText
from scheduler.decoding import Decoding
from scheduler.errors import InvalidRequest
from scheduler.messages import Priority, Request, Sampling
from scheduler.validation import SEED_MAX, check_request


def drawn_seed(config: ClusterConfig) -> int:
    """For a call that names none: the settings' seed, or another one each time."""
    return secrets.randbelow(SEED_MAX) if config.seed is None else config.seed


def requests_of(
    call: GenerateCall,
    number: int,
    tokens: tuple[int, ...],
    text: TargetText,
    config: ClusterConfig,
    grammar: str = "",
    priority: Priority = Priority.NORMAL,
    tenant: str = "",
) -> list[Request]:
    """One for each choice of the prompt of this number, whose tokens are given. `grammar`: of the
    call's structure.

    Raises InvalidRequest for what no replica of the target could serve.
    """
    turns = isinstance(call.prompts[number], ChatPrompt) or call.structure is not None
    own_ends = text.end_of_turn_ids if turns else text.eos_token_ids
    ends = (*call.stop_token_ids, *(() if call.ignore_eos else own_ends))
    most = call.max_new_tokens
    if most == 0:
        # A replica tells of the prompt with the first new token.
        most, ends = 1, ()
    left = max(text.context_len - len(tokens), 1)
    seed = call.seed or 0
    if call.seed is None and call.sampled:
        assert call.drawn_seed is not None
        seed = (call.drawn_seed + number * call.choices) % SEED_MAX
    sampling = Sampling(call.temperature, call.top_k, call.top_p, call.min_p, seed)
    limits = config.frontend
    request = Request(
        id="unsent",
        prompt=tokens,
        max_new_tokens=min(limits.max_new_tokens, left) if most is None else most,
        sampling=sampling,
        stop_token_ids=tuple(dict.fromkeys(ends)),
        draft_len=call.draft_len,
        timeout_s=limits.timeout_s if call.timeout_s is None else call.timeout_s,
        committed=tuple(call.committed_token_ids),
        priority=priority,
        tenant=tenant,
        cache_salt=call.cache_salt,
        decoding=_decoding(call, len(tokens), text, grammar),
    )
    check_request(request, config.scheduler, text.spec)
    others = [
        replace(request, sampling=replace(sampling, seed=(seed + choice) % SEED_MAX))
        for choice in range(1, call.choices)
    ]
    return [request, *others]


def check_logprobs(requests: Iterable[Request], before: int, config: ClusterConfig) -> int:
    """How many log-probabilities these requests of a call may bring, and those `before` them.

    Raises InvalidRequest for more than a call may ask for.
    """
    asked = dict.fromkeys(("logprobs", "prompt_logprobs"), 0)
    for request in requests:
        if (decoding := request.decoding) is None:
            continue
        if decoding.logprobs is not None:
            new = request.max_new_tokens - len(request.committed)
            asked["logprobs"] += new * (1 + decoding.logprobs)
        if decoding.prompt_logprobs is not None:
            asked["prompt_logprobs"] += len(request.prompt) * (1 + decoding.prompt_logprobs)
    total, most = before + sum(asked.values()), config.frontend.logprobs_max
    if total > most:
        field = max(asked, key=asked.__getitem__)
        reason = (
            f"more than {most} log-probabilities asked for, by tokens times tokens told of in the"
            " place of each; ask for fewer, or in several calls"
        )
        raise InvalidRequest(field, reason)
    return total


def _decoding(
    call: GenerateCall, prompt_tokens: int, text: TargetText, grammar: str
) -> Decoding | None:
    """What the call asks of a replica beyond sampling."""
    words = {form for word in call.bad_words for form in text.word_forms(word)}
    decoding = Decoding(
        prompt_tokens=prompt_tokens,
        logit_bias=tuple(sorted(call.logit_bias.items())),
        repetition_penalty=call.repetition_penalty,
        frequency_penalty=call.frequency_penalty,
        presence_penalty=call.presence_penalty,
        min_tokens=call.min_tokens,
        bad_words=tuple(sorted(words)),
        grammar=grammar,
        logprobs=call.logprobs,
        prompt_logprobs=call.prompt_logprobs,
    )
    return None if decoding == Decoding(prompt_tokens) else decoding
