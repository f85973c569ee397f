"""What a user of the `openai` package does; prints what came back as one JSON object.

Run with the package's own environment: python openai_calls.py BASE_URL MODEL < questions.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

BASE_URL, MODEL = sys.argv[1:]
QUESTIONS = json.load(sys.stdin)
MESSAGES, PROMPT, LIMIT = (QUESTIONS[name] for name in ("messages", "prompt", "limit"))
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
USAGE: Any = {"include_usage": True}


class Report(BaseModel):
    colour: Literal["red", "blue"]
    certain: bool


def main() -> dict[str, Any]:
    client = openai.OpenAI(base_url=BASE_URL, api_key="unused", max_retries=0, timeout=120)
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": LIMIT}
    greedy = asked | {"temperature": 0}
    chat = client.chat.completions
    said: dict[str, Any] = {"models": [model.id for model in client.models.list()]}
    said["model"] = client.models.retrieve(MODEL).id

    whole = chat.create(**greedy)
    assert whole.usage is not None
    said["chat"] = whole.choices[0].message.content
    said["finish_reason"] = whole.choices[0].finish_reason
    said["usage"] = whole.usage.model_dump()
    streamed = list(chat.create(**greedy, stream=True, stream_options=USAGE))
    said["streamed"] = "".join(
        chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices
    )
    usage = streamed[-1].usage
    said["streamed_tokens"] = None if usage is None else usage.completion_tokens
    with chat.stream(**greedy) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        said["helper"] = "".join(deltas)

    several = chat.create(**asked, temperature=1, seed=5, n=3)
    said["several"] = [choice.message.content for choice in several.choices]
    alone = [chat.create(**asked, temperature=1, seed=5 + index) for index in range(3)]
    said["alone"] = [choice.choices[0].message.content for choice in alone]

    told = chat.create(**greedy, logprobs=True, top_logprobs=3).choices[0].logprobs
    assert told is not None
    said["logprobs"] = [
        {
            "token": logprob.token,
            "own": logprob.logprob,
            "top": [top.logprob for top in logprob.top_logprobs],
        }
        for logprob in told.content or []
    ]

    parsed = chat.parse(**(greedy | {"max_completion_tokens": 60}), response_format=Report)
    report = parsed.choices[0].message.parsed
    said["parsed"] = None if report is None else report.model_dump()

    forced = greedy | {"tools": [TOOL], "tool_choice": "required", "max_completion_tokens": 60}
    called = chat.create(**forced, parallel_tool_calls=False).choices[0]
    said["called_finish"] = called.finish_reason
    said["called"] = [call.to_dict()["function"] for call in called.message.tool_calls or []]
    with chat.stream(**forced, parallel_tool_calls=False) as stream:
        stream.until_done()
        final = stream.get_final_completion().choices[0].message
        said["called_streamed"] = [
            {"name": call.function.name, "arguments": call.function.arguments}
            for call in final.tool_calls or []
        ]
    call_id = (called.message.tool_calls or [])[0].id
    answer: Any = {"role": "tool", "tool_call_id": call_id, "content": "sunny"}
    turns = [*MESSAGES, called.message, answer]
    said["after_call"] = chat.create(**(greedy | {"messages": turns})).choices[0].finish_reason

    plain: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0}
    said["completion"] = client.completions.create(**plain, max_tokens=LIMIT).choices[0].text
    stop = said["completion"][10:13]
    stopped = client.completions.create(**plain, max_tokens=LIMIT, stop=stop).choices[0]
    said["stop"], said["stopped"] = stop, [stopped.text, stopped.finish_reason]

    for name, wrong in (("unknown_model", {"model": "x"}), ("negative", {"temperature": -1})):
        try:
            chat.create(**(greedy | wrong))
        except openai.APIStatusError as error:
            said[name] = [type(error).__name__, error.status_code, error.param]
    said["async"], said["async_streamed"] = asyncio.run(at_once(greedy))
    return said


async def at_once(asked: dict[str, Any]) -> tuple[list[str | None], str]:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="unused", max_retries=0) as client:
        answers = await asyncio.gather(*[client.chat.completions.create(**asked) for _ in range(8)])
        streamed = ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            streamed += chunk.choices[0].delta.content or ""
    return [answer.choices[0].message.content for answer in answers], streamed


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
