"""Proves: over both APIs what is wrong is refused with the name that the field has there and with
what is allowed, whole and streamed, before any token becomes text and any request is sent.

The ranges of numbers are the scheduler's, and have their own test there.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from grpc import StatusCode

from cluster.frontend.http_api.bodies.parameters import PARAMETERS, Kind
from protos import lockstep_pb2 as pb
from tests.cluster.frontend.http_rig import (
    ASKED,
    GRPC_TOOLS,
    HERMES_TEMPLATE,
    TOOLS,
    post,
    served_tiny,
)
from tests.cluster.frontend.rig import CONFIG, Context, both, stream, unfinished

Rows = list[tuple[dict[str, Any], str]]
"""Fields of a request, and the beginning of the sentence on what is wrong with them."""

A_NAME = "must be 1 to 64 of the characters a-z, A-Z, 0-9, '_', '.' and '-', is 'a b'"
AN_OBJECT = "must be the text of a JSON object, is"
A_CALL = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[]"}]}
NO_SCHEMA = {"name": "a", "parameters": "x"}
NO_TYPED = {"name": "a", "parameters": '{"type": "thing"}'}
TOOLED: dict[str, Any] = {"messages": ASKED, "tools": GRPC_TOOLS}
OPTIONS = "chat_template_kwargs"
GRPC: Rows = [
    ({"prompt": None}, "prompt: one of prompt, prompt_token_ids and messages must be given"),
    ({"prompt": ""}, "prompt: must not be empty"),
    ({"prompt": "x" * (CONFIG.frontend.prompt_bytes_max + 1)}, "prompt: 1048577 bytes, at most"),
    ({"prompt_token_ids": {}}, "prompt_token_ids: must not be empty"),
    ({"prompt_token_ids": {"ids": [1, 99999]}}, "prompt_token_ids: "),
    ({"prompt_token_ids": {"ids": [5] * 200_000}}, "prompt_token_ids: 200000 tokens, at most"),
    ({"prompt_token_ids": {"ids": [5] * 5_000_000}}, "request: "),
    ({"request_id": "y" * 129}, "request_id: 129 characters, at most 128 allowed"),
    ({"cache_salt": "y" * 129}, "cache_salt: 129 characters, at most 128 allowed"),
    ({"max_new_tokens": 0}, "max_new_tokens: must be at least 1, is 0"),
    ({"max_new_tokens": -1}, "max_new_tokens: must be at least 1, is -1"),
    ({"max_new_tokens": -1, "prompt_logprobs": 1}, "max_new_tokens: must be at least 0, is -1"),
    ({"temperature": math.nan}, "temperature: must be in [0, 1e+06], is nan"),
    ({"stop": ["a"] * 65}, "stop: 65 given, at most 64 allowed"),
    ({"stop": ["a" * 257]}, "stop: a string must have 1 to 256 characters, has 257"),
    ({"stop": [""]}, "stop: a string must have 1 to 256 characters, has 0"),
    ({"stop_token_ids": [5] * 200_000}, "stop_token_ids: 200000 given, at most 64 allowed"),
    ({"stop_token_ids": [99999]}, "stop_token_ids: "),
    ({"committed_token_ids": [5] * 200_000}, "committed_token_ids: 200000 given, at most"),
    ({"committed_token_ids": [99999]}, "committed_token_ids: "),
    ({"committed_token_ids": [5] * 3, "max_new_tokens": 2}, "committed_token_ids: 3 tokens"),
    ({"committed_token_ids": [5], "temperature": 1}, "seed: "),
    ({"committed_token_ids": [5], "max_new_tokens": 0, "prompt_logprobs": 1}, "committed_token"),
    ({"committed_token_ids": [5], "n": 2}, "committed_token_ids: only one sequence"),
    ({"n": 0}, "n: must be at least 1, is 0"),
    ({"n": 2**31 - 1}, "n: 2147483647 sequences asked for, at most 128 allowed"),
    ({"priority": 9}, "priority: must be one of PRIORITY_UNSPECIFIED, PRIORITY_HIGH, PRIORITY"),
    ({"prompt": "a", "tools": GRPC_TOOLS}, "tools: only with messages"),
    ({"messages": ASKED, "tool_mode": 2}, "tool_choice: no tools are given"),
    (TOOLED | {"tool_mode": 7}, "tool_mode: must be one of TOOL_MODE_UNSPECIFIED, TOOL_MODE_NONE"),
    (TOOLED | {"tool_name": "x"}, "tool_choice: 'x' is not among the tools"),
    ({"messages": ASKED, "tools": [{"name": "a b"}]}, f"tools.0.name: {A_NAME}"),
    ({"messages": ASKED, "tools": [NO_SCHEMA]}, f"tools.0.parameters: {AN_OBJECT} 'x'"),
    ({"messages": ASKED, "tools": [NO_TYPED], "tool_mode": 2}, "tools: "),
    ({"messages": [A_CALL]}, f"messages.0.tool_calls.0.arguments: {AN_OBJECT}"),
    ({"messages": ASKED, "prompt": "x"}, "messages: prompt is given as well"),
    ({"messages": [{"content": "x"}]}, "messages: a role must not be empty"),
    ({"messages": ASKED * 1025}, "messages: 1025 given, at most 1024 allowed"),
    ({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}, "messages: 1048580 bytes, at"),
    ({"messages": ASKED, OPTIONS: json.dumps({"a": "x" * (1 << 20)})}, "messages: 10486"),
    ({"messages": ASKED, OPTIONS: "[]"}, f"{OPTIONS}: {AN_OBJECT}"),
    ({"messages": ASKED, OPTIONS: '{"tokenize": 1}'}, f"{OPTIONS}: tokenize is not"),
]
TOO_LONG = "prompt: the maximum context length is 1024 tokens, "
A_PROMPT = "must be a text, a list of token ids, or a list of either, is"
FORM: dict[str, Any] = {"type": "const_string", "value": "a"}
for _ in range(17):
    FORM = {"type": "or", "elements": [FORM]}
DEEP = {"type": "structural_tag", "format": FORM}
COMPLETIONS: Rows = [
    ({"temprature": 1}, "temprature: unknown name; did you mean temperature?"),
    ({"prompt": []}, f"prompt: {A_PROMPT} []"),
    ({"prompt": [1, "x"]}, f"prompt: {A_PROMPT} [1, 'x']"),
    ({"prompt": [True]}, f"prompt: {A_PROMPT}"),
    ({"prompt": [[5], [99999]]}, "prompt: "),
    ({"prompt": ["x"] * 129}, "prompt: 129 sequences asked for, at most 128 allowed"),
    ({"prompt": None}, "prompt: must be given"),
    ({"max_tokens": 0}, "max_tokens: must be at least 1, is 0"),
    ({"max_tokens": 10**6}, TOO_LONG + "1000001 were asked for: 1 of the prompt and 1000000 new"),
    ({"max_tokens": 1.5}, "max_tokens: must be a whole number, is 1.5"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens: must be in [0, max_new_tokens], is 6"),
    ({"temperature": "hot"}, "temperature: must be a number, is 'hot'"),
    ({"logprobs": 21}, "logprobs: must be in [0, 20], is 21"),
    ({"frequency_penalty": 2.5}, "frequency_penalty: must be in [-2, 2], is 2.5"),
    ({"repetition_penalty": 0}, "repetition_penalty: must be finite and above 0"),
    ({"logit_bias": {"x": 1}}, "logit_bias: the keys must be token ids, not 'x'"),
    ({"logit_bias": {"1": 101}}, "logit_bias: must be in [-100, 100], is 101"),
    ({"logit_bias": {"99999": 1}}, "logit_bias: "),
    ({"logit_bias": {"5": None}}, "logit_bias.5: must be a number, is None"),
    ({"bad_words": [""]}, "bad_words: a string must have"),
    ({"stop": 5}, "stop: must be a text or a list, is 5"),
    ({"priority": 77}, "priority: must be 'high', 'normal', 'low' or 0, is 77"),
    ({"user": "y" * 129}, "user: 129 characters, at most 128 allowed"),
    ({"structured_outputs": {}}, "structured_outputs: exactly one of json, json_object, regex"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs: "),
    ({"guided_regex": "a", "regex": "b"}, "regex: guided_regex is given as well"),
    ({"ebnf": "root ::= nothing"}, "ebnf: no GBNF: Rule 'nothing' not found"),
    ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs: must be the text of"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs: structures: must be"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format: format: its"),
    ({"response_format": DEEP}, "response_format: format: more than 16 forms within each other"),
    ({"allowed_token_ids": [5], "bad_words": ["a"]}, "allowed_token_ids: not together with"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids: "),
    ({"logprob_token_ids": [5]}, "logprob_token_ids: only with logprobs"),
    ({"logprob_token_ids": [5] * 129, "logprobs": 1}, "logprob_token_ids: 129 given, at most 128"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: must be -1 or at least 1, is 0"),
    ({"seed": 2**63}, "seed: must be in [-2**63, 2**63), is 9223372036854775808"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json: must be a mapping or a text"),
]
A_MODE = "must be 'none', 'auto' or 'required' or a mapping, is"
A_TEXT = "must be a text or a list of parts of type text, is"
IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
SHAPE = {"type": "json_schema"}
NO_TYPE = {"name": "a", "schema": {"type": "thing"}}
BOUND: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
NAMED = {"type": "function", "function": {"name": "x"}}
MISTYPED = {"type": "function", "function": {"name": "a", "parameters": {"type": "thing"}}}
HALF_A_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
NO_CALLS = {"role": "assistant", "content": None, "tool_calls": []}
SPACED = {"type": "function", "function": {"name": "a b"}}
CHATS: Rows = [
    ({"messages": []}, "messages: must not be empty"),
    ({"chat_template": "x"}, "chat_template: not allowed: frontend.request_templates"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message: not with add_generation_prompt",
    ),
    ({"kv_transfer_params": {"prompt_token_ids": "x"}}, "kv_transfer_params: prompt_token_ids"),
    ({"messages": "x"}, "messages: must be a list, is 'x'"),
    ({"messages": [{"role": "user"}]}, f"messages.0.content: {A_TEXT} None"),
    ({"messages": [IMAGE]}, f"messages.0.content: {A_TEXT}"),
    ({"max_completion_tokens": 10**6}, f"messages: {TOO_LONG.partition(': ')[2]}"),
    ({"top_logprobs": 2}, "top_logprobs: only with logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: must be in [0, 20], is 21"),
    ({"response_format": SHAPE}, "response_format: json_schema: with the type"),
    ({"response_format": SHAPE | {"json_schema": NO_TYPE}}, "response_format: "),
    ({"response_format": SHAPE | {"json_schema": {}}}, "response_format.json_schema.schema: must"),
    (BOUND | {"tools": [MISTYPED], "response_format": {"type": "text"}}, "tools: "),
    ({"messages": [HALF_A_CALL]}, "messages.0.tool_calls.0.function.arguments: must be given"),
    ({"messages": [NO_CALLS | {"tool_calls": "x"}]}, "messages.0.tool_calls: must be a list"),
    ({"tools": [{}]}, "tools.0.type: must be given; tools.0.function: must be given"),
    ({"tools": [TOOLS[0] | {"type": "x"}]}, "tools.0.type: must be 'function', is 'x'"),
    ({"tools": [SPACED]}, f"tools.0.function.name: {A_NAME}"),
    ({"tool_choice": "required"}, "tool_choice: no tools are given"),
    ({"tool_choice": "sometimes"}, f"tool_choice: {A_MODE} 'sometimes'"),
    (
        {"tool_choice": {"type": "function", "functoin": {"name": "x"}}},
        "tool_choice.function: must be given; "
        "tool_choice.functoin: unknown name; did you mean function?; "
        "tool_choice.type: must be 'allowed_tools', is 'function'",
    ),
    ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice: 'x' is not among the tools"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs: tokenize is not"),
]


@pytest.fixture(autouse=True)
def nothing_becomes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("nothing of a refused request becomes text")

    monkeypatch.setattr("cluster.frontend.service.TextStream", refuse)


async def test_over_grpc() -> None:
    async with served_tiny(HERMES_TEMPLATE, replicas=0) as (made, _app):
        for fields, said in GRPC:
            prompt = {} if fields.keys() & {"prompt_token_ids", "messages"} else {"prompt": "x"}
            request = pb.GenerateRequest(**(prompt | fields))
            for context in await both(made, request):
                assert context.code is StatusCode.INVALID_ARGUMENT, said
                assert context.details.startswith(said)
            assert await stream(made, request, Context()) == [pb.GenerateChunk()]
        assert unfinished(made.service) == 0


@pytest.mark.parametrize("streamed", [True, False])
async def test_over_http(streamed: bool) -> None:
    unsupported: Rows = [
        ({name: "x"}, f"{name}: not supported")
        for name, parameter in PARAMETERS.items()
        if parameter.kind is Kind.REFUSED and "." not in name
    ]
    cases = [("completions", {"prompt": "x"} | fields, said) for fields, said in COMPLETIONS]
    cases += [("chat/completions", {"messages": ASKED} | fields, said) for fields, said in CHATS]
    for path in ("completions", "chat/completions"):
        cases += [(path, fields, said) for fields, said in unsupported]
    if not streamed:
        alone = {"prompt": "x", "stream_options": {}}
        cases.append(("completions", alone, "stream_options: only with stream"))
    async with served_tiny(HERMES_TEMPLATE, replicas=0) as (made, app):
        for path, fields, said in cases:
            answer = await post(app, path, **fields, stream=streamed)
            assert answer.status == 400, said
            assert answer.error["message"].startswith(said), answer.error
            assert answer.error["param"] == said.partition(": ")[0]
            assert answer.error["message"].count("; ") == said.count("; "), "nothing else is wrong"
            assert answer.error["type"] == "invalid_request_error"
        assert unfinished(made.service) == 0
