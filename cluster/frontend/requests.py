"""What a call asks of the pool: one request for each of its sequences."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cluster.config import ClusterConfig
from cluster.frontend.calls import GenerateCall
from cluster.frontend.prompts import ChatPrompt
from cluster.frontend.target_text import TargetText
from scheduler.decoding import Decoding
from scheduler.errors import InvalidRequest
from scheduler.messages import Priority, Request, Sampling
from scheduler.validation import SEED_MAX, check_request


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
    ) -> list[Request]:
        """One for each choice of the prompt of this number, whose tokens are given. `grammar`: of
        the call's structure.

        Raises InvalidRequest for what no replica of the target could serve.
        """
        text, limits = self.text, self.config.frontend
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
        request = Request(
            id="unsent",
            prompt=tokens,
            max_new_tokens=min(limits.max_new_tokens, left) if most is None else most,
            sampling=sampling,
            stop_token_ids=tuple(dict.fromkeys(ends)),
            draft_len=call.draft_len,
            timeout_s=limits.timeout_s if call.timeout_s is None else call.timeout_s,
            committed=tuple(call.committed_token_ids),
            priority=Priority.NORMAL if call.priority is None else call.priority,
            tenant=tenant,
            cache_salt=call.cache_salt,
            decoding=_decoding(call, len(tokens), text, grammar),
        )
        check_request(request, self.config.scheduler, text.spec)
        others = [
            replace(request, sampling=replace(sampling, seed=(seed + choice) % SEED_MAX))
            for choice in range(1, call.choices)
        ]
        return [request, *others]

    def check_logprobs(self, requests: Iterable[Request]) -> None:
        """Raises InvalidRequest where these requests of a call may bring more log-probabilities
        than a call may ask for."""
        asked = dict.fromkeys(("logprobs", "prompt_logprobs"), 0)
        for request in requests:
            if (decoding := request.decoding) is None:
                continue
            if decoding.logprobs is not None:
                new = request.max_new_tokens - len(request.committed)
                asked["logprobs"] += new * (1 + decoding.logprobs)
            if decoding.prompt_logprobs is not None:
                asked["prompt_logprobs"] += len(request.prompt) * (1 + decoding.prompt_logprobs)
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
        grammar=grammar,
        logprobs=call.logprobs,
        prompt_logprobs=call.prompt_logprobs,
    )
    return None if decoding == Decoding(prompt_tokens) else decoding
