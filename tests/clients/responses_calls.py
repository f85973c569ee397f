"""What a user of the `openai` package does with Responses; prints what came back as JSON.

Run with the package's own environment: python responses_calls.py BASE_URL MODEL < questions.json
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

BASE_URL, MODEL = sys.argv[1:]
QUESTIONS = json.load(sys.stdin)
MESSAGES, LIMIT = (QUESTIONS[name] for name in ("messages", "limit"))
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Report(BaseModel):
    colour: Literal["red", "blue"]
    certain: bool


def checked(response: Response) -> Response:
    """As its own type has it, which the client itself does not check."""
    return Response.model_validate(response.to_dict())


def main() -> dict[str, Any]:
    client = openai.OpenAI(base_url=BASE_URL, api_key="unused", max_retries=0, timeout=120)
    asked: dict[str, Any] = {"model": MODEL, "input": MESSAGES, "temperature": 0}
    limited = asked | {"max_output_tokens": LIMIT}
    whole = checked(client.responses.create(**limited))
    said: dict[str, Any] = {"text": whole.output_text, "status": whole.status}
    events = list(client.responses.create(**limited, stream=True))
    for event in events:
        EVENTS.validate_python(event.to_dict())
    said["streamed"] = "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    with client.responses.stream(**limited) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        said["helper"] = "".join(deltas)

    parsed = client.responses.parse(**asked, max_output_tokens=60, text_format=Report)
    report = parsed.output_parsed
    said["parsed"] = None if report is None else report.model_dump()

    forced = asked | {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 60}
    called = checked(client.responses.create(**forced, parallel_tool_calls=False))
    [call] = called.output
    assert call.type == "function_call"
    said["called"] = json.loads(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    more = limited | {"input": [result], "previous_response_id": called.id}
    said["after_call"] = client.responses.create(**more).output_text
    turns = [*MESSAGES, call.to_dict(), result]
    said["after_turns"] = client.responses.create(**(limited | {"input": turns})).output_text

    said["found"] = client.responses.retrieve(whole.id).output_text
    client.responses.delete(whole.id)
    try:
        client.responses.retrieve(whole.id)
    except openai.NotFoundError as error:
        said["deleted"] = error.status_code
    return said


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
