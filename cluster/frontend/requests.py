"""What a call asks of the pool: one request for each of its sequences."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cluster.config import ClusterConfig
from cluster.frontend.calls import GenerateCall
from cluster.frontend.prompts import ChatPrompt
from cluster.frontend.target_text import TargetText
from scheduler.decoding import Decoding
from scheduler.errors import ContextExceeded, InvalidRequest
from scheduler.messages import Priority, Request, Sampling
from scheduler.validation import SEED_MAX, check_request

_EXPECTED = 256
"""New tokens that load counts where a request sets no limit."""


@dataclass(frozen=True, slots=True)
class RequestFactory:
    """Makes the requests of calls, by what this process knows of the target and by its settings."""

    text: TargetText
    config: ClusterConfig

    def drawn_seed(self) -> int:
        """For a call that names none: the settings' seed, or another one each time."""
        return secrets.randbelow(SEED_MAX) if self.config.seed is None else self.config.seed

    def requests(
        self,
        call: GenerateCall,
        number: int,
        tokens: tuple[int, ...],
        grammar: str = "",
        tenant: str = "",
        context_len: float = math.inf,
    ) -> list[Request]:
        """One for each choice of the prompt of this number, whose tokens are given. `grammar`: of
        the call's structure; `context_len`: what replicas hold, where that is known.

        Raises InvalidRequest for what no replica of the target could serve.
        """
        text, limits = self.text, self.config.frontend
        turns = isinstance(call.prompts[number], ChatPrompt) or call.structure is not None
        own_ends = text.end_of_turn_ids if turns else text.eos_token_ids
        ends = (*call.stop_token_ids, *(() if call.ignore_eos else own_ends))
        most = self._limit(call, number, len(tokens), context_len)
        if call.max_new_tokens == 0:
            # A replica tells of the prompt with the first new token.
            ends = ()
        seed = (call.seed or 0) % SEED_MAX
        if call.seed is None and call.sampled:
            assert call.drawn_seed is not None
            seed = (call.drawn_seed + number * call.choices) % SEED_MAX
        sampling = Sampling(call.temperature, call.top_k, call.top_p, call.min_p, seed)
        request = Request(
            id="unsent",
            prompt=tokens,
            max_new_tokens=most,
            sampling=sampling,
            stop_token_ids=tuple(dict.fromkeys(ends)),
            draft_len=call.draft_len,
            timeout_s=limits.timeout_s if call.timeout_s is None else call.timeout_s,
            committed=tuple(call.committed_token_ids),
            priority=Priority.NORMAL if call.priority is None else call.priority,
            tenant=tenant,
            cache_salt=call.cache_salt,
            decoding=_decoding(call, len(tokens), text, grammar),
            expected_new_tokens=min(_EXPECTED, most) if call.max_new_tokens is None else None,
        )
        check_request(request, self.config.scheduler, text.spec)
        others = [
            replace(request, sampling=replace(sampling, seed=(seed + choice) % SEED_MAX))
            for choice in range(1, call.choices)
        ]
        return [request, *others]

    def truncated(self, call: GenerateCall, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens of a prompt that are taken."""
        most = call.truncate_prompt_tokens
        if most == -1:
            asked = call.max_new_tokens or call.default_new_tokens
            most = max(self.text.context_len - max(asked or 1, 1), 1)
        if most is None or most >= len(tokens):
            return tokens
        return tokens[:most] if call.truncation_side == "right" else tokens[len(tokens) - most :]

    def _limit(self, call: GenerateCall, number: int, prompt: int, context_len: float) -> int:
        """The most new tokens behind so many of a prompt. Raises ContextExceeded."""
        held = int(min(self.text.context_len, context_len))
        most = call.max_new_tokens
        if most is None:
            limits = (call.default_new_tokens, self.config.frontend.max_new_tokens, held - prompt)
            most = min(limit for limit in limits if limit is not None)
        most = max(most, 1)
        if prompt + most <= held:
            return most
        asked = "" if call.max_new_tokens is None else f" and {most} new ones"
        reason = (
            f"the maximum context length is {held} tokens, {prompt + most} were asked for:"
            f" {prompt} of the {call.prompts[number].field}{asked}"
        )
        raise ContextExceeded(call.prompts[number].field, reason)

    def check_logprobs(self, requests: Iterable[Request]) -> None:
        """Raises InvalidRequest where these requests of a call may bring more log-probabilities
        than a call may ask for."""
        asked = dict.fromkeys(("logprobs", "prompt_logprobs"), 0)
        every = self.text.spec.logits_size

        def of_places(places: int, told: int) -> int:
            return places * (1 + (every if told == -1 else min(told, every)))

        for request in requests:
            if (decoding := request.decoding) is None:
                continue
            if decoding.logprobs is not None:
                new = request.max_new_tokens - len(request.committed)
                told = len(decoding.logprob_token_ids) or decoding.logprobs
                asked["logprobs"] += of_places(new, told)
            if decoding.prompt_logprobs is not None:
                asked["prompt_logprobs"] += of_places(len(request.prompt), decoding.prompt_logprobs)
        most = self.config.frontend.logprobs_max
        if sum(asked.values()) > most:
            field = max(asked, key=asked.__getitem__)
            reason = (
                f"more than {most} log-probabilities asked for, by tokens times tokens told of in"
                " the place of each; ask for fewer, or in several calls"
            )
            raise InvalidRequest(field, reason)


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
        allowed_token_ids=tuple(sorted(set(call.allowed_token_ids))),
        grammar=grammar,
        logprobs=call.logprobs,
        logprob_token_ids=tuple(dict.fromkeys(call.logprob_token_ids)),
        prompt_logprobs=call.prompt_logprobs,
    )
    return None if decoding == Decoding(prompt_tokens) else decoding
