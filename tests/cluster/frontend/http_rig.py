"""HTTP requests to a frontend of the rig, and targets that know chats and tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from cluster.config import ClusterConfig
from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.http_api.app import http_app
from cluster.frontend.target_text import TargetText
from protos import lockstep_pb2 as pb
from replicas.config import ReplicaConfig
from replicas.decoding import load_grammars
from replicas.grammars import Grammars
from replicas.pair import Pair, load_pair
from replicas.replica import Replica
from tests.cluster.fakes import load_fake_text, tokenizer
from tests.cluster.frontend.rig import CONFIG, frontend

JSON = {"content-type": "application/json"}
MODEL = "tiny"


# --------------------------------------------------------------------------- requests


class Answer:
    """What an ASGI application sent."""

    def __init__(self, sent: list[dict[str, Any]]) -> None:
        self.status: int = sent[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in sent[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found


async def http(
    app: ASGIApp,
    body: bytes = b"",
    path: str = "/v1/completions",
    headers: dict[str, str] | None = None,
    client: str | None = "127.0.0.1",
    parts: int = 1,
    ends: bool = True,
    leaves: bool = False,
    method: str = "",
) -> Answer:
    """One request, its body in so many parts; the client does not say that its body ends unless it
    `ends`, and `leaves` behind it."""
    size = -(-len(body) // parts) or 1
    chunks = [body[at : at + size] for at in range(0, max(len(body), 1), size)]
    incoming = [
        {"type": "http.request", "body": chunk, "more_body": not ends or n + 1 < len(chunks)}
        for n, chunk in enumerate(chunks)
    ] + [{"type": "http.disconnect"}] * leaves
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not incoming:
            await asyncio.Event().wait()
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method or ("POST" if body or path == "/v1/completions" else "GET"),
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "client": None if client is None else (client, 5000),
        "headers": [(k.encode(), v.encode()) for k, v in (JSON | (headers or {})).items()],
    }
    await app(scope, receive, send)
    return Answer(sent)


async def post(
    app: ASGIApp, path: str, headers: dict[str, str] | None = None, **fields: Any
) -> Answer:
    """`path`: behind /v1/, unless it is a whole one."""
    body = json.dumps({"model": MODEL} | fields).encode()
    path = path if path.startswith("/") else f"/v1/{path}"
    return await http(app, body, path=path, headers=headers)


Event = tuple[str, dict[str, Any]]
"""Its id and its data."""


def numbered(answer: Answer) -> list[Event]:
    """Events by their ids; the last one is empty where the stream came to its proper end."""
    assert answer.status == 200
    *parts, nothing = answer.body.decode().split("\n\n")
    assert nothing == ""
    found = []
    for part in parts:
        name, _, data = part.rpartition("data: ")
        said = {} if data == "[DONE]" else json.loads(data)
        found.append((name.removeprefix("id: ").removesuffix("\n"), said))
    return found


def events(answer: Answer) -> list[dict[str, Any]]:
    """Of a stream that came to its proper end."""
    assert answer.headers["content-type"] == "text/event-stream"
    *told, (_, nothing) = numbered(answer)
    assert nothing == {}
    return [said for _, said in told]


def together(events: list[Event]) -> dict[str, Any]:
    """What a client makes of them; the ids of calls are as random as the times."""
    events = [event for event in events if event[1]]
    [answer] = {said["id"] for _, said in events}
    choices: dict[int, dict[str, Any]] = {}
    usages = []
    for _, said in events:
        if not said["choices"]:
            usages.append(said["usage"]["completion_tokens"])
            continue
        [one] = said["choices"]
        new = {"text": "", "ids": [], "logprobs": [], "calls": {}, "roles": 0}
        new |= {"prompts": [], "prompt_ids": [], "reasons": []}
        assert one["index"] not in choices or "prompt_token_ids" not in one, "in the first one"
        choice = choices.setdefault(one["index"], new)
        delta = one.get("delta", {})
        choice["roles"] += "role" in delta
        choice["text"] += one.get("text", delta.get("content", ""))
        choice["ids"] += one.get("token_ids", [])
        told = one["logprobs"] or {}
        rows = zip(*told.values(), strict=True) if "tokens" in told else told.get("content", ())
        choice["logprobs"] += rows
        for part in delta.get("tool_calls", ()):
            function = part["function"]
            if "id" in part:
                assert part["type"] == "function"
                assert part["index"] not in choice["calls"]
                choice["calls"][part["index"]] = [function["name"], ""]
            choice["calls"][part["index"]][1] += function["arguments"]
        # A chat has them beside its choices.
        of_prompt = {**said, **one}
        for name, key in (("prompts", "prompt_logprobs"), ("prompt_ids", "prompt_token_ids")):
            choice[name] += [of_prompt[key]] if key in of_prompt else []
        choice["reasons"] += [one["finish_reason"]] if one["finish_reason"] else []
    for choice in choices.values():
        choice["tokens"] = len(choice["ids"]) or len(choice["logprobs"])
    return {"id": answer, "choices": choices, "usages": usages}


# --------------------------------------------------------------------------- conversations


TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<s>{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
ENCODER = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer(), eos_token="</s>", chat_template=TEMPLATE
)
TEXT = replace(load_fake_text(ReplicaConfig()), encoder=ENCODER, eos_token_ids=())
TURNS = [("system", "be brief"), ("user", "the fox?"), ("assistant", "lazy"), ("user", "why?")]


def messages(turns: Sequence[tuple[str, str]]) -> list[pb.ChatMessage]:
    return [pb.ChatMessage(role=role, content=content) for role, content in turns]


TURNS_JSON = [{"role": role, "content": content} for role, content in TURNS]


def beginning() -> PreTrainedTokenizerFast:
    """Puts <s> before a text, and has a template that knows tools."""
    made = tokenizer().from_str(tokenizer().to_str())
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=HERMES_TEMPLATE)


# --------------------------------------------------------------------------- tools


HERMES_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer with <tool_call>{...}</tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "\n</tool_call>{% endfor %}\n{% endfor %}assistant: "
)
LLAMA_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with {"name": ..., "parameters": ...}\n{% endif %}'
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}"
    "{% if not loop.last %}; {% endif %}{% endfor %}\n{% endfor %}assistant: "
)
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TIME = {"name": "time"}
TOOLS = [{"type": "function", "function": tool} for tool in (WEATHER, TIME)]
GRPC_TOOLS = [
    pb.Tool(name="weather", parameters=json.dumps(WEATHER["parameters"])),
    pb.Tool(name="time"),
]
ASKED = [{"role": "user", "content": "what is the weather?"}]


# --------------------------------------------------------------------------- frontends


@asynccontextmanager
async def http_frontend(**options: Any) -> AsyncIterator[FastAPI]:
    async with frontend(**options) as made:
        yield http_app(made.service)


@asynccontextmanager
async def served(
    config: ClusterConfig = CONFIG, text: TargetText = TEXT, **options: Any
) -> AsyncIterator[tuple[GrpcApi, FastAPI]]:
    async with frontend(config=config, text=text, **options) as made:
        yield made, http_app(made.service)


PAIR = ReplicaConfig(
    target="tiny", device="cpu", torch_threads=1, num_gpu_blocks_override=256, calibrate=False
)


@cache
def tiny_text() -> TargetText:
    return TargetText.load(PAIR)


@cache
def tiny_parts() -> tuple[Pair, Grammars | None]:
    pair = load_pair(PAIR)
    return pair, load_grammars(PAIR, pair.target.config.vocab_size)


def load_tiny() -> Replica:
    """A new replica over models and grammars that are loaded once."""
    pair, grammars = tiny_parts()
    replica = Replica(pair, PAIR)
    replica.grammars = grammars
    return replica


def templated(template: str | dict[str, str]) -> TargetText:
    """The tiny target with this chat template."""
    encoder = copy(tiny_text().encoder)
    encoder.chat_template = template
    return replace(tiny_text(), encoder=encoder)


@asynccontextmanager
async def served_tiny(
    template: str | dict[str, str] | None = None, config: ClusterConfig = CONFIG, **options: Any
) -> AsyncIterator[tuple[GrpcApi, FastAPI]]:
    """With the tiny pair behind it."""
    config = config.model_copy(update={"replica": PAIR})
    text = tiny_text() if template is None else templated(template)
    async with served(config, text, load=load_tiny, **options) as both:
        yield both
