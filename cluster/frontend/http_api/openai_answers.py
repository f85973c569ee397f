"""What OpenAI's API says of an answer: whole ones, chunks of a stream, log-probabilities, usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from cluster.frontend.answer import Answer, AnswerSequence
from cluster.frontend.calls import Delta, GenerateCall, SequenceEnd
from cluster.frontend.http_api import speculation
from cluster.frontend.http_api.bodies import ChatRequest, GenerationRequest
from cluster.frontend.http_api.bodies.parts import StreamOptions
from cluster.frontend.http_api.event_ids import EventId, Place
from cluster.frontend.http_api.text_offsets import TextOffsets, TokenNames
from cluster.frontend.json_codec import LongArray, json_array, json_pieces
from cluster.frontend.prompts import TextPrompt
from cluster.frontend.target_text import TargetText
from cluster.frontend.text import CHARACTER_BYTES, Detokenizer, special_ids
from cluster.frontend.tools import CallDelta, ToolCall
from scheduler.decoding import TokenLogprobs
from scheduler.messages import FinishReason

_FINISH_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}
_TOLD_AT_ONCE = 4096
"""Tokens with log-probabilities; a place in the text is found for each in about a microsecond."""


@dataclass(slots=True)
class _Written:
    """One sequence as far as it was written."""

    sequence: AnswerSequence
    place: Place
    """How far the client is."""
    echo: str
    """The prompt as its text repeats it."""
    passed_over: int
    """Tokens at its beginning that the client has of an earlier stream, and that are in no place of
    the text yet."""
    offsets: TextOffsets
    """Of its tokens, the prompt's with `echo`."""

    @property
    def told_of_prompt(self) -> list[tuple[int, TokenLogprobs | None]]:
        """Each token: nothing of the first, and of none where committed tokens ended the answer
        before a replica had it."""
        told = chain([None], self.sequence.prompt_logprobs)
        return list(zip_longest(self.sequence.prompt, told))


class OpenAIAnswer:
    """The answer to one request: `begin` it, then give it each delta."""

    def __init__(
        self, asked: GenerationRequest, text: TargetText, last: EventId | None = None
    ) -> None:
        """`last`: of the events that the client has of an earlier stream of the same call. A stream
        is a function of its call, so any frontend writes it once more, and leaves out those.
        """
        self.asked = asked
        self._text = text
        self._chat = isinstance(asked, ChatRequest)
        self._last = last
        made = ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex
        self.id = made if last is None else last.answer
        self._created = int(time.time())
        options = asked.stream_options or StreamOptions()
        self._with_usage = options.include_usage
        self._usage_so_far = self._with_usage and options.continuous_usage_stats
        self._seed = 0
        self._written: list[_Written] = []
        self._ends: dict[int, SequenceEnd] = {}
        self._names = TokenNames(
            text, asked.return_tokens_as_token_ids, bool(asked.logprob_token_ids)
        )

    def begin(self, answer: Answer) -> None:
        self._seed = answer.seed(0) or 0
        sequences = answer.sequences
        places = [Place()] * len(sequences) if self._last is None else self._last.places
        self._written = [
            self._begun(answer.call, sequence, place)
            for sequence, place in zip(sequences, places, strict=True)
        ]

    def whole(self, deltas: Iterable[Delta]) -> Iterable[str]:
        """Its text, in pieces; `deltas`: one of each sequence, with all of it."""
        deltas = sorted(deltas, key=lambda delta: delta.index)
        told = sum(
            len(delta.logprobs) + len(self._written[delta.index].sequence.prompt_logprobs)
            for delta in deltas
        )
        if told > _TOLD_AT_ONCE:
            return self._choice_by_choice(deltas)
        choices = [self._choice(delta) for delta in deltas]
        return json_pieces(self._object(choices, chunk=False) | self._costs())

    def _choice_by_choice(self, deltas: Sequence[Delta]) -> Iterator[str]:
        """The same text. To make all choices before the first is written would take a second."""
        [around] = json_pieces(self._object([], chunk=False))
        yield around.removesuffix("]}")
        for number, delta in enumerate(deltas):
            yield "," * (number > 0)
            yield from json_pieces(self._choice(delta))
        [costs] = json_pieces(self._costs())
        yield "]," + costs.removeprefix("{")

    def event(self, said: Mapping[str, Any], told_usage: bool = False) -> Iterable[str]:
        """As it is sent, with its id, in pieces."""
        places = [written.place for written in self._written]
        name = EventId(self.id, self._seed, places, told_usage)
        return chain([f"id: {name}\ndata: "], json_pieces(said), ["\n\n"])

    def next_event(self, delta: Delta) -> Iterable[str] | None:
        """None: the client has it already."""
        written = self._written[delta.index]
        first = self._chat and delta.index == 0 and written.place == Place()
        choice = self._choice(delta)
        if written.place.ended:
            return None
        written.place = Place(written.place.tokens + len(delta.tokens), delta.end is not None)
        said = self._object([choice])
        if first:
            said |= self._asked_of_prompt(written)
        if self._with_usage:
            said["usage"] = self._counted() if self._usage_so_far else None
        return self.event(said)

    def last_events(self) -> Iterator[Iterable[str]]:
        if self._with_usage and not (self._last is not None and self._last.told_usage):
            yield self.event(self._object([]) | self._costs(), told_usage=True)
        yield ["data: [DONE]\n\n"]

    # ------------------------------------------------------------------ parts

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """What a delta adds to its choice; the first one has what is said of the prompt."""
        written, asked, end = self._written[delta.index], self.asked, delta.end
        first = written.place == Place()
        told = [
            *(self._of_prompt(written) if first else ()),
            *zip(delta.tokens, delta.logprobs, strict=False),
        ]
        text = written.echo * first + delta.text
        said: dict[str, Any] = {"text": text}
        if self._chat:
            said = self._turn(text, delta, first)
        said["logprobs"] = None
        if asked.top_logprobs_wanted is not None:
            logprobs = self._chat_logprobs(told) if self._chat else self._logprobs(told, written)
            said["logprobs"] = logprobs
        if asked.return_token_ids:
            said["token_ids"] = list(delta.tokens)
        elif not asked.stream:
            said["token_ids"] = None
        if asked.speculative_decoding_stats:
            said["drafted"] = list(delta.drafted)
            if end is not None:
                said["speculative_decoding_stats"] = speculation.stats(end.usage)
        if first and not self._chat:
            said |= self._asked_of_prompt(written)
        reason = None
        if end is not None:
            self._ends[delta.index] = end
            reason = _FINISH_REASONS.get(end.reason)
            if reason == "stop" and written.sequence.called:
                functions = isinstance(asked, ChatRequest) and asked.calls_functions
                reason = "function_call" if functions else "tool_calls"
            stop = said["stop_reason"] = end.stop if end.stop_token is None else end.stop_token
            # SGLang's name; it tells of the target's own tokens, too.
            said["matched_stop"] = end.end_token if stop is None else stop
        return {"index": delta.index, **said, "finish_reason": reason}

    def _asked_of_prompt(self, written: _Written) -> dict[str, Any]:
        """Where vLLM has it: of completions in a choice, of a chat in the answer. A stream has it
        once, and nothing where nothing is asked for."""
        asked = self.asked
        said: dict[str, Any] = {"prompt_token_ids": None, "prompt_logprobs": None}
        if asked.stream:
            said.clear()
        if asked.return_token_ids:
            said["prompt_token_ids"] = list(written.sequence.prompt)
        if asked.prompt_logprobs is not None:
            said["prompt_logprobs"] = self._prompt_logprobs(written)
        return said

    def _turn(self, text: str, delta: Delta, first: bool) -> dict[str, Any]:
        """The assistant's whole turn, or what a delta adds to it."""
        reasoning = delta.reasoning or None
        # vLLM's name, and that of most others, whose clients read it where there is none, too.
        told = {"reasoning_content": reasoning}
        if reasoning or not self.asked.stream:
            told["reasoning"] = reasoning
        functions = isinstance(self.asked, ChatRequest) and self.asked.calls_functions
        if not self.asked.stream:
            made = [_called(call.whole) for call in delta.calls if call.whole is not None]
            turn: dict[str, Any] = {"role": "assistant", "content": text}
            if made or reasoning:
                turn["content"] = text or None
            if made:
                calls = (
                    {"function_call": made[0]["function"]} if functions else {"tool_calls": made}
                )
                turn |= calls
            return {"message": turn | told}
        turn = {"role": "assistant"} if first else {}
        turn |= {"content": text} if text else {}
        parts = _call_parts(delta.calls)
        if parts:
            turn |= {"function_call": parts[0]["function"]} if functions else {"tool_calls": parts}
        return {"delta": turn | told}

    def _counted(self) -> dict[str, int]:
        """The usage of a stream up to here."""
        new = sum(written.place.tokens for written in self._written)
        new += len(self.asked.committed_token_ids)
        given = sum(len(each.sequence.prompt) for each in self._written[:: self.asked.n])
        counts = {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}
        thought = sum(written.sequence.reasoning_tokens for written in self._written)
        return counts | {"reasoning_tokens": thought}

    def _costs(self) -> dict[str, Any]:
        """The usage, of a single sequence how fast it was written and how speculation went, and of
        a whole chat what is asked of its prompt."""
        costs: dict[str, Any] = {"usage": speculation.usage(self._ends, self.asked.n)}
        if len(self._ends) == 1:
            [end] = self._ends.values()
            costs["metrics"] = speculation.times(end)
            if end.usage.draft_tokens:
                costs["metrics"]["speculative_decoding"] = speculation.steps(end.usage)
        if self._chat and not self.asked.stream:
            costs |= self._asked_of_prompt(self._written[0])
        return costs

    def _of_prompt(self, written: _Written) -> list[tuple[int, TokenLogprobs | None]]:
        """The prompt's tokens and theirs, where they are echoed."""
        if not self.asked.echoes or self.asked.top_logprobs_wanted is None:
            return []
        return written.told_of_prompt

    def _logprobs(
        self, told: Sequence[tuple[int, TokenLogprobs | None]], written: _Written
    ) -> dict[str, Any]:
        """Moves `written` on by the tokens told of."""
        if written.passed_over:
            before, written.passed_over = written.passed_over, 0
            at = len(self.asked.committed_token_ids)
            seen = written.sequence.live.tokens[at : at + before]
            self._logprobs([*self._of_prompt(written), *((token, None) for token in seen)], written)
        names = [self._names.name(token) for token, _ in told]
        pairs = zip(told, names, strict=True)
        offsets = [self._offset(token, name, written) for (token, _), name in pairs]
        return {
            "tokens": json_array(told, lambda of: self._names.shown(of[0])),
            "token_logprobs": json_array(told, lambda of: None if of[1] is None else of[1].logprob),
            "top_logprobs": json_array(told, self._names.top, _size(told)),
            "text_offset": json_array(offsets, int),
        }

    def _chat_logprobs(self, told: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        known = [(token, said) for token, said in told if said is not None]
        return {"content": json_array(known, self._names.of_chat, _size(known)), "refusal": None}

    def _prompt_logprobs(self, written: _Written) -> list[Any] | LongArray:
        told = written.told_of_prompt
        return json_array(told, self._names.ranked, _size(told))

    def _offset(self, token: int, name: str, written: _Written) -> int:
        """Where the token stands in the text. A special one has no place in an answer, and in a
        prompt only where it was given itself."""
        if not self.asked.skip_special_tokens or token not in special_ids(self._text.tokenizer):
            return written.offsets.place(token, self._text.token_bytes(token))
        given = written.echo.startswith(name, written.offsets.end)
        return written.offsets.skip(name if given else "")

    def _begun(self, call: GenerateCall, sequence: AnswerSequence, place: Place) -> _Written:
        prompt, echo = call.prompts[sequence.index // call.choices], ""
        before: list[int] = []
        if isinstance(self.asked, ChatRequest):
            echo = self.asked.echoed_turn
        elif self.asked.echoes:
            cut = call.truncate_prompt_tokens is not None
            echo = prompt.text if isinstance(prompt, TextPrompt) and not cut else ""
            echo = echo or self._echo(sequence)
        elif self.asked.top_logprobs_wanted is not None and not self._chat:
            before = [*sequence.prompt, *call.committed_token_ids]
        ends_with = b"".join(map(self._text.token_bytes, before[-CHARACTER_BYTES:]))
        made = self._text.tokenizer
        shown = frozenset[int]() if self.asked.skip_special_tokens else special_ids(made)
        offsets = TextOffsets(Detokenizer(made, before, shown), ends_with)
        return _Written(sequence, place, echo, place.tokens, offsets)

    def _echo(self, sequence: AnswerSequence) -> str:
        """The text of a prompt of tokens up to a character that the answer may make whole, which
        comes with the answer's text."""
        shown = list(sequence.prompt)
        shown = shown[: len(shown) - sequence.text.take_from_prompt()]
        return self._text.tokenizer.decode(shown, skip_special_tokens=False)

    def _object(self, choices: list[dict[str, Any]], chunk: bool = True) -> dict[str, Any]:
        kind = "chat.completion" + ".chunk" * chunk if self._chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.asked.model,
            "choices": choices,
        }


def _size(told: Iterable[tuple[int, TokenLogprobs | None]]) -> int:
    """The most log-probabilities in one place."""
    return max((said.told for _, said in told if said is not None), default=1)


def _call_parts(calls: Iterable[CallDelta]) -> list[dict[str, Any]]:
    """Of each call what comes next: first its name, and the arguments as they come."""
    parts: dict[int, dict[str, Any]] = {}
    for call in calls:
        part = parts.setdefault(call.index, {"index": call.index, "function": {"arguments": ""}})
        if call.name:
            part |= {"id": call.id, "type": "function"}
            part["function"]["name"] = call.name
        part["function"]["arguments"] += call.arguments
    return list(parts.values())


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
