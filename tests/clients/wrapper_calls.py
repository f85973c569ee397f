"""What users of litellm, langchain-openai, instructor and pydantic-ai do; prints what came back as
one JSON object.

Run with the packages' own environment: python wrapper_calls.py BASE_URL MODEL < questions.json
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import instructor
import litellm
import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE_URL, MODEL = sys.argv[1:]
QUESTIONS = json.load(sys.stdin)
SYSTEM, USER, LIMIT = (QUESTIONS[name] for name in ("system", "user", "limit"))
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]


class Report(BaseModel):
    colour: Literal["red", "blue"]
    certain: bool


def of_litellm() -> dict[str, Any]:
    asked: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "api_base": BASE_URL}
    asked |= {"messages": MESSAGES, "max_tokens": LIMIT, "temperature": 0, "api_key": "unused"}
    whole = litellm.completion(**asked)
    events = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(each.choices[0].delta.content or "" for each in events if each.choices)
    return {"whole": whole.choices[0].message.content, "streamed": streamed}


def of_langchain() -> dict[str, Any]:
    chat = ChatOpenAI(
        base_url=BASE_URL, api_key="unused", model=MODEL, temperature=0, max_tokens=LIMIT
    )
    turns = [SystemMessage(SYSTEM), HumanMessage(USER)]
    typed = chat.with_structured_output(Report, method="json_schema").invoke(turns)
    return {
        "whole": chat.invoke(turns).content,
        "streamed": "".join(str(chunk.content) for chunk in chat.stream(turns)),
        "typed": typed.model_dump(),
    }


def of_instructor() -> dict[str, Any]:
    client = openai.OpenAI(base_url=BASE_URL, api_key="unused")
    found = {}
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        patched = instructor.from_openai(client, mode=mode)
        typed = patched.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_model=Report, max_retries=0, temperature=0
        )
        found[mode.value] = typed.model_dump()
    return found


def of_pydantic_ai() -> dict[str, Any]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key="unused"))
    settings: Any = {"temperature": 0, "max_tokens": LIMIT}
    plain = Agent(model, system_prompt=SYSTEM, model_settings=settings).run_sync(USER)
    typed = Agent(model, system_prompt=SYSTEM, output_type=Report).run_sync(USER)
    return {"whole": plain.output, "typed": typed.output.model_dump()}


if __name__ == "__main__":
    parts = (of_litellm, of_langchain, of_instructor, of_pydantic_ai)
    print(json.dumps({part.__name__.removeprefix("of_"): part() for part in parts}))
