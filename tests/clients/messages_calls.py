"""What a user of the `anthropic` package does; prints what came back as one JSON object.

Run with the package's own environment: python messages_calls.py SERVER_URL MODEL < questions.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic
from anthropic.types import Message

BASE_URL, MODEL = sys.argv[1:]
QUESTIONS = json.load(sys.stdin)
MESSAGES, LIMIT = (QUESTIONS[name] for name in ("messages", "limit"))
TOOL: Any = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


ANY: Any = {"type": "any", "disable_parallel_tool_use": True}


def main() -> dict[str, Any]:
    client = anthropic.Anthropic(base_url=BASE_URL, api_key="unused", max_retries=0, timeout=120)
    system, *turns = MESSAGES
    asked: dict[str, Any] = {"model": MODEL, "system": system["content"], "messages": turns}
    limited = asked | {"max_tokens": LIMIT, "extra_body": {"temperature": 0}}
    # The client itself does not check its types.
    whole = Message.model_validate(client.messages.create(**limited).to_dict())
    [block] = whole.content
    assert block.type == "text"
    said: dict[str, Any] = {"text": block.text, "stop_reason": whole.stop_reason}
    with client.messages.stream(**limited) as stream:
        said["streamed"] = "".join(stream.text_stream)
        said["final"] = stream.get_final_message().stop_reason
    said["counted"] = client.messages.count_tokens(**asked).input_tokens

    forced = limited | {"tools": [TOOL], "max_tokens": 60}
    called = client.messages.create(**forced, tool_choice=ANY)
    call = called.content[0]
    assert call.type == "tool_use"
    said["called"], said["called_stop"] = call.input, called.stop_reason
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [
        *turns,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    said["after_call"] = client.messages.create(**(limited | {"messages": history})).stop_reason
    try:
        client.messages.create(**(limited | {"max_tokens": -1}))
    except anthropic.BadRequestError as error:
        said["refused"] = error.status_code
    return said


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
