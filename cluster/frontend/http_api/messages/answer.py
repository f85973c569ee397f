"""What Messages says of an answer: blocks, and the events that they come in."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from cluster.frontend.answer import Answer
from cluster.frontend.calls import Delta, SequenceEnd
from cluster.frontend.http_api.bodies.messages import MessagesRequest
from cluster.frontend.json_codec import json_pieces
from cluster.frontend.tools import json_object
from scheduler.messages import FinishReason

Event = dict[str, Any]
_TEXTS = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}
"""Of a block: the field that its text is in, and the type of its deltas."""


class MessagesAnswer:
    """The answer to one request: `begin` it, then give it each delta."""

    def __init__(self, asked: MessagesRequest, block_size: int) -> None:
        """`block_size`: tokens that are kept as prefixes together."""
        self.asked = asked
        self.id = f"msg_{uuid.uuid4().hex}"
        self._block_size = block_size
        self._content: list[dict[str, Any]] = []
        self._open = ""
        """The type of the block that is being written, the last of the content."""
        self._arguments = ""
        self._prompt_tokens = 0
        self._begun = False
        self._called = False
        self._end: SequenceEnd | None = None

    def begin(self, answer: Answer) -> None:
        self._prompt_tokens = len(answer.sequences[0].prompt)

    def whole(self, deltas: Iterable[Delta]) -> Iterable[str]:
        for delta in deltas:
            self._events(delta)
        return json_pieces(self._message() | {"usage": self._usage()})

    def next_event(self, delta: Delta) -> Iterable[str] | None:
        return chain.from_iterable(map(self.event, self._events(delta)))

    def last_events(self) -> Iterator[Iterable[str]]:
        reason, stop = self._stopped
        changes = {"stop_reason": reason, "stop_sequence": stop}
        yield self.event({"type": "message_delta", "delta": changes, "usage": self._usage()})
        yield self.event({"type": "message_stop"})

    def event(self, said: Event) -> Iterable[str]:
        said = said if "type" in said else {"type": "error", **said}
        return chain([f"event: {said['type']}\ndata: "], json_pieces(said), ["\n\n"])

    def _events(self, delta: Delta) -> list[Event]:
        told = list[Event]()
        if not self._begun:
            self._begun = True
            usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
            told.append({"type": "message_start", "message": self._message() | {"usage": usage}})
        for kind, text in (("thinking", delta.reasoning), ("text", delta.text)):
            if text:
                told += self._say(kind, text)
        for call in delta.calls:
            if call.name:
                block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                told += self._start(block)
            if call.arguments:
                self._arguments += call.arguments
                told.append(self._delta(type="input_json_delta", partial_json=call.arguments))
            if call.whole is not None:
                self._called = True
                told += self._stop()
        if delta.end is not None:
            told += self._stop()
            self._end = delta.end
        return told

    def _say(self, kind: str, text: str) -> Iterator[Event]:
        name, delta = _TEXTS[kind]
        if self._open != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._start({"type": kind, name: "", **signature})
        self._content[-1][name] += text
        yield self._delta(**{"type": delta, name: text})

    def _start(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._stop()
        self._content.append(block)
        self._open, self._arguments = block["type"], ""
        index = len(self._content) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _delta(self, **delta: str) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stop(self) -> Iterator[Event]:
        if not self._open:
            return
        if self._open == "tool_use":
            try:
                self._content[-1]["input"] = json_object(self._arguments)
            except ValueError:
                self._content[-1]["input"] = {}  # the call was cut
        if self._open == "thinking":
            yield self._delta(type="signature_delta", signature="")
        self._open = ""
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    @property
    def _stopped(self) -> tuple[str | None, str | None]:
        """Why the message ended, and the text that ended it."""
        if self._end is None:
            return None, None
        if self._end.reason is FinishReason.LENGTH:
            return "max_tokens", None
        if self._end.stop is not None:
            return "stop_sequence", self._end.stop
        return ("tool_use" if self._called else "end_turn"), None

    def _message(self) -> dict[str, Any]:
        reason, stop = self._stopped
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.asked.model,
            "content": json.loads(json.dumps(self._content)),
            "stop_reason": reason,
            "stop_sequence": stop,
        }

    def _usage(self) -> dict[str, int]:
        """Tokens of the prompt are counted once: as read from what is kept, as kept from now on, or
        as neither."""
        assert self._end is not None
        prompt, cached = self._end.prompt_tokens, self._end.usage.cached_tokens
        created = max(prompt // self._block_size * self._block_size - cached, 0)
        return {
            "input_tokens": prompt - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": self._end.completion_tokens,
        }
