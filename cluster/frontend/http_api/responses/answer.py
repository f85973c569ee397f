"""What Responses says of an answer: its items, and the typed events that they come in."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from cluster.frontend.answer import Answer
from cluster.frontend.calls import Delta, SequenceEnd
from cluster.frontend.http_api.bodies.responses import ResponsesRequest
from cluster.frontend.json_codec import json_array, json_pieces
from cluster.frontend.target_text import TargetText
from cluster.frontend.tools import CallDelta
from scheduler.messages import FinishReason

Event = dict[str, Any]


class ResponsesAnswer:
    """The answer to one request: `begin` it, then give it each delta.

    A whole answer goes through the same events as a stream, and tells of the last one alone.
    """

    def __init__(
        self,
        asked: ResponsesRequest,
        text: TargetText,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        """`on_end`: gets the whole response."""
        self.asked = asked
        self._text = text
        self._on_end = on_end
        self.id = _new_id("resp")
        self._created = int(time.time())
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The item that is being written, the last of the output."""
        self._call = -1
        """The number of the call that it is."""
        self._begun = False
        self._end: SequenceEnd | None = None
        self._prompt: Sequence[int] = ()
        self._tokens: list[int] = []

    def begin(self, answer: Answer) -> None:
        self._prompt = answer.sequences[0].prompt

    def whole(self, deltas: Iterable[Delta]) -> Iterable[str]:
        """Its text, in pieces."""
        for delta in deltas:
            self.events(delta)
        return json_pieces(self.finished())

    def next_event(self, delta: Delta) -> Iterable[str] | None:
        return chain.from_iterable(map(self.event, self.events(delta)))

    def last_events(self) -> Iterator[Iterable[str]]:
        response = self.finished()
        kind = "completed" if response["status"] == "completed" else "incomplete"
        yield self.event(self._told(f"response.{kind}", response=response))

    def event(self, said: Event) -> Iterable[str]:
        """As it is sent, in pieces."""
        if "error" in said:
            error = said["error"]
            names = ("code", "message", "param")
            said = self._told("error", **{name: error.get(name) for name in names})
        return chain([f"event: {said['type']}\ndata: "], json_pieces(said), ["\n\n"])

    def events(self, delta: Delta) -> list[Event]:
        """All that a delta adds."""
        told = [*self._beginning()]
        self._tokens += delta.tokens
        if delta.reasoning:
            told += self._say("reasoning", delta.reasoning, {})
        if delta.text:
            logprobs = [self._logprob(at, delta) for at in range(len(delta.logprobs))]
            told += self._say("message", delta.text, {"logprobs": logprobs})
        for call in delta.calls:
            told += self._say_call(call)
        if delta.end is not None:
            self._end = delta.end
            told += self._close()
        return told

    def finished(self) -> dict[str, Any]:
        """The whole response."""
        assert self._end is not None
        cut = self._end.reason is FinishReason.LENGTH
        # A call that is cut is no call.
        output = [
            item
            for item in self._output
            if item["type"] != "function_call" or item["status"] == "completed"
        ]
        output = output or [_item("message", status="incomplete" if cut else "completed")]
        response = self.response("incomplete" if cut else "completed", output)
        if self.asked.enable_response_messages:
            response["input_messages"] = [self._raw(self._prompt)]
            response["output_messages"] = [self._raw(self._tokens)]
        self._on_end(response)
        return response

    def response(self, status: str, output: Sequence[Any] = ()) -> dict[str, Any]:
        asked, end = self.asked, self._end
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        text = {"format": {"type": "text"}}
        if asked.text is not None and asked.text.format is not None:
            text = {"format": asked.text.format.model_dump(by_alias=True, exclude_unset=True)}
        choice = asked.tool_choice
        effort = None if asked.reasoning is None else asked.reasoning.effort
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": asked.background,
            "error": None,
            "incomplete_details": cut,
            "instructions": asked.instructions or None,
            "max_output_tokens": asked.limit[1],
            "model": asked.model,
            "output": list(output),
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": asked.store,
            "temperature": asked.temperature,
            "text": text,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in asked.tools],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None if end is None else _usage(end),
            "user": asked.user or None,
            "metadata": asked.metadata,
        }

    # ------------------------------------------------------------------ items

    def _beginning(self) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            for kind in ("response.created", "response.in_progress"):
                yield self._told(kind, response=self.response("in_progress"))

    def _told(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._output) - 1}
        return self._told(kind, **place, **fields)

    def _say(self, kind: str, text: str, more: dict[str, Any]) -> Iterator[Event]:
        """More text of an item of this kind, which begins if it is not open."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield self._begin_item(_item(kind, status="in_progress"))
            part = _part(kind)
            self._open["content"] = [part]  # type: ignore[index]  # it was begun
            yield self._of_item("response.content_part.added", content_index=0, part=dict(part))
        assert self._open is not None
        [part] = self._open["content"]
        part["text"] += text
        if "logprobs" in part:
            part["logprobs"] = [*part["logprobs"], *more["logprobs"]]
        yield self._of_item(f"response.{part['type']}.delta", content_index=0, delta=text, **more)

    def _say_call(self, call: CallDelta) -> Iterator[Event]:
        if call.name:
            yield from self._close()
            self._call = call.index
            fields = {"call_id": call.id, "name": call.name, "arguments": ""}
            yield self._begin_item(_item("function_call", status="in_progress") | fields)
        if self._open is None or call.index != self._call:
            return
        if call.arguments:
            self._open["arguments"] += call.arguments
            kind = "response.function_call_arguments.delta"
            yield self._of_item(kind, delta=call.arguments)
        if call.whole is not None:
            yield from self._close()

    def _begin_item(self, item: dict[str, Any]) -> Event:
        self._open = item
        self._output.append(item)
        index = len(self._output) - 1
        return self._told("response.output_item.added", output_index=index, item=_copy(item))

    def _close(self) -> Iterator[Event]:
        """End the item that is open."""
        if (item := self._open) is None:
            return
        cut = self._end is not None and self._end.reason is FinishReason.LENGTH
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "function_call":
            item["status"] = "completed" if _is_object(item["arguments"]) else "incomplete"
            kind = "response.function_call_arguments.done"
            yield self._of_item(kind, arguments=item["arguments"], name=item["name"])
        else:
            [part] = item["content"]
            told = {"text": part["text"]}
            told |= {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, **told)
            yield self._of_item("response.content_part.done", content_index=0, part=dict(part))
        index = len(self._output) - 1
        yield self._told("response.output_item.done", output_index=index, item=_copy(item))
        self._open = None

    def _logprob(self, at: int, delta: Delta) -> dict[str, Any]:
        said = delta.logprobs[at]
        top = json_array(said.top, lambda other: self._named(*other))
        return self._named(delta.tokens[at], said.logprob) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        own = self._text.token_bytes(token)
        return {"token": own.decode(errors="replace"), "logprob": logprob, "bytes": list(own)}

    def _raw(self, tokens: Sequence[int]) -> dict[str, Any]:
        message = self._text.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return {"type": "raw_message_tokens", "message": message, "tokens": list(tokens)}


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def _item(kind: str, status: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": _new_id(_IDS[kind]), "type": kind, "status": status}
    if kind == "message":
        item |= {"role": "assistant", "content": []}
    elif kind == "reasoning":
        item |= {"summary": [], "content": []}
    return item


def _part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now."""
    if "content" not in item:
        return dict(item)
    return item | {"content": [dict(part) for part in item["content"]]}


def _is_object(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(text), dict)
    return False


def _usage(end: SequenceEnd) -> dict[str, Any]:
    cached = end.usage.cached_tokens
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }
