"""What OpenAI's API says of an answer: whole ones, chunks of a stream, log-probabilities, usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from cluster.frontend.calls import Delta, SequenceEnd
from cluster.frontend.http_api.openai_models import AnyRequest, ChatRequest
from cluster.frontend.target_text import TargetText
from cluster.frontend.tools import ToolCall
from scheduler.decoding import TokenLogprobs
from scheduler.messages import FinishReason, Usage

_FINISH_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Place:
    """How far a client is in the stream of one sequence."""

    tokens: int = 0
    chars: int = 0
    """Of the content."""
    calls: int = 0
    """Of tools."""


@dataclass(slots=True)
class Written:
    """One sequence as far as it was written."""

    prompt: Sequence[int]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    """Of tools."""
    chars: int = 0
    """Of the texts of its tokens, the prompt's with `echo`: where the next token begins."""
    place: Place = Place()
    """How far the events went, those included that were left out."""
    skip: Place = Place()
    """What the client has of an earlier stream."""

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.calls += delta.calls


class OpenAIAnswer:
    """What the answers to one request look like."""

    def __init__(self, asked: AnyRequest, text: TargetText) -> None:
        self.asked = asked
        self._text = text
        self._chat = isinstance(asked, ChatRequest)
        self.id = ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())
        options = asked.stream_options
        self.with_usage = options is not None and options.include_usage

    def whole(
        self, written: Mapping[int, Written], ends: Mapping[int, SequenceEnd]
    ) -> dict[str, Any]:
        choices = []
        for index in sorted(ends):
            one, end = written[index], ends[index]
            told = [*self._of_prompt(one, end), *zip(one.tokens, one.logprobs, strict=False)]
            text = one.text
            if self.asked.echoes:
                text = self._echo(index, one.prompt) + text
            said = self._said(text, told, one, whole=True)
            if one.calls:
                said["message"]["content"] = text or None
                said["message"]["tool_calls"] = [_called(call) for call in one.calls]
            if self.asked.return_token_ids:
                said |= {"token_ids": one.tokens, "prompt_token_ids": list(one.prompt)}
            if self.asked.prompt_logprobs is not None:
                said["prompt_logprobs"] = self._prompt_logprobs(one, end)
            choices.append(self._choice(index, said, end, one))
        kind = "chat.completion" if self._chat else "text_completion"
        return self._object(kind, choices) | self._costs(ends)

    def events(self, delta: Delta, one: Written, first: bool) -> Iterator[dict[str, Any]]:
        """Of one sequence; `first`: its first ones. What the client has already is left out."""
        text = delta.text
        if first and self._chat and one.skip == Place():
            role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield self._chunk(delta.index, role, None, one)
        elif first and self.asked.echoes:
            text = self._echo(delta.index, one.prompt) + text
        tokens, told = list(delta.tokens), list(zip(delta.tokens, delta.logprobs, strict=False))
        seen = max(0, min(one.skip.tokens - one.place.tokens, len(tokens)))
        if seen and self.asked.top_logprobs_wanted is not None:
            one.chars += sum(len(self._name(token)) for token in tokens[:seen])
        told, new_tokens = told[seen:], tokens[seen:]
        new_text = text[max(0, one.skip.chars - one.place.chars) :]
        begun = len(one.calls)
        one.calls += delta.calls
        one.place = Place(one.place.tokens + len(tokens), one.place.chars + len(text), begun)
        if new_text and delta.calls:
            yield self._chunk(delta.index, self._said(new_text, [], one, whole=False), None, one)
            new_text = ""
        for number, call in enumerate(delta.calls, begun):
            one.place = replace(one.place, calls=number + 1)
            if number >= one.skip.calls:
                called = {"tool_calls": [{"index": number, **_called(call)}]}
                yield self._chunk(delta.index, {"delta": called, "logprobs": None}, None, one)
        reads = self.asked.tool_use is not None
        if new_text or told or delta.end is not None or (new_tokens and not reads):
            said = self._said(new_text, told, one, whole=False)
            if self.asked.return_token_ids:
                said["token_ids"] = new_tokens
            yield self._chunk(delta.index, said, delta.end, one)

    def usage_event(self, ends: Mapping[int, SequenceEnd]) -> dict[str, Any]:
        return self._object(self._chunk_kind, []) | self._costs(ends)

    def usage(self, ends: Mapping[int, SequenceEnd]) -> dict[str, Any]:
        """A prompt counts once, however many choices it has."""
        new = sum(end.completion_tokens for end in ends.values())
        prompts = [end for index, end in ends.items() if index % self.asked.n == 0]
        given = sum(end.prompt_tokens for end in prompts)
        drafted = sum(end.usage.draft_tokens for end in ends.values())
        accepted = sum(end.usage.accepted_tokens for end in ends.values())
        return {
            "prompt_tokens": given,
            "completion_tokens": new,
            "total_tokens": given + new,
            "prompt_tokens_details": {
                "cached_tokens": sum(end.usage.cached_tokens for end in prompts)
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    # ------------------------------------------------------------------ parts

    def _costs(self, ends: Mapping[int, SequenceEnd]) -> dict[str, Any]:
        """The usage, and for a single sequence that had drafts how speculation went."""
        costs: dict[str, Any] = {"usage": self.usage(ends)}
        if len(ends) == 1:
            [end] = ends.values()
            if end.usage.draft_tokens:
                costs["metrics"] = {"speculative_decoding": _speculation(end.usage)}
        return costs

    def _said(
        self,
        text: str,
        told: Sequence[tuple[int, TokenLogprobs | None]],
        one: Written,
        whole: bool,
    ) -> dict[str, Any]:
        """Text and log-probabilities of a choice; moves `one` on by the tokens told of."""
        logprobs = None
        if self.asked.top_logprobs_wanted is not None:
            logprobs = self._chat_logprobs(told) if self._chat else self._logprobs(told, one)
        if not self._chat:
            return {"text": text, "logprobs": logprobs}
        if whole:
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        else:
            said = {"delta": {"content": text} if text else {}}
        return said | {"logprobs": logprobs}

    def _of_prompt(self, one: Written, end: SequenceEnd) -> list[tuple[int, TokenLogprobs | None]]:
        """The prompt's tokens and theirs, where they are echoed; nothing is told of the first."""
        if not self.asked.echoes or self.asked.top_logprobs_wanted is None:
            return []
        return list(zip(one.prompt, (None, *end.prompt_logprobs), strict=True))

    def _logprobs(
        self, told: Sequence[tuple[int, TokenLogprobs | None]], one: Written
    ) -> dict[str, Any]:
        tokens: list[str] = []
        own: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, said in told:
            name = self._name(token)
            tokens.append(name)
            offsets.append(one.chars)
            one.chars += len(name)
            own.append(None if said is None else said.logprob)
            if said is None:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            # Tokens that are part of a character may have one name: the likeliest has it.
            for other, logprob in (*said.top, (token, said.logprob)):
                top.setdefault(self._name(other), logprob)
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": own,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _chat_logprobs(self, told: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        content = [
            self._named(token, said.logprob)
            | {"top_logprobs": [self._named(*other) for other in said.top]}
            for token, said in told
            if said is not None
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": logprob,
            "bytes": list(self._text.token_bytes(token)),
        }

    def _prompt_logprobs(self, one: Written, end: SequenceEnd) -> list[dict[str, Any] | None]:
        """By token: the likeliest ones and the one that stands there; nothing of the first."""
        every: list[dict[str, Any] | None] = [None]
        for token, said in zip(one.prompt[1:], end.prompt_logprobs, strict=True):
            ranks = {other: (rank, value) for rank, (other, value) in enumerate(said.top, 1)}
            ranks[token] = (said.rank, said.logprob)
            every.append(
                {
                    str(other): {
                        "logprob": logprob,
                        "rank": rank,
                        "decoded_token": self._name(other),
                    }
                    for other, (rank, logprob) in ranks.items()
                }
            )
        return every

    def _name(self, token: int) -> str:
        return self._text.token_bytes(token).decode(errors="replace")

    def _echo(self, index: int, prompt: Sequence[int]) -> str:
        given = self.asked.prompt_text(index // self.asked.n)
        return self._text.tokenizer.decode(list(prompt)) if given is None else given

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(
        self, index: int, said: dict[str, Any], end: SequenceEnd | None, one: Written
    ) -> dict[str, Any]:
        chunk = self._object(self._chunk_kind, [self._choice(index, said, end, one)])
        return chunk | ({"usage": None} if self.with_usage else {})

    def _choice(
        self, index: int, said: dict[str, Any], end: SequenceEnd | None, one: Written
    ) -> dict[str, Any]:
        reason = None if end is None else _FINISH_REASONS.get(end.reason)
        if reason == "stop" and one.calls:
            reason = "tool_calls"
        return {"index": index, **said, "finish_reason": reason}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.asked.model,
            "choices": choices,
        }


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _speculation(usage: Usage) -> dict[str, Any]:
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
