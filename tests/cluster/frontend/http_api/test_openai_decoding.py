"""Proves, with the tiny pair behind both edges: gRPC and OpenAI's API have the same fields and give
the same tokens for them; log-probabilities, of the answer and of an echoed prompt, are those of
transformers. An answer repeats its prompt, also with stop strings, several prompts and choices, and
tells of it without any new token; text, tokens and their offsets agree where special tokens stand
in the prompt or in the answer.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from google.protobuf.descriptor import Descriptor
from google.protobuf.json_format import ParseDict
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

from cluster.client.retry import Continuation
from cluster.config_sources import from_args
from cluster.frontend.http_api.bodies import ChatRequest, CompletionRequest
from cluster.frontend.http_api.bodies.parts import Message
from cluster.frontend.tools.use import CalledFunction, CallTurn, Function
from protos import lockstep_pb2 as pb
from replicas.demo import TARGET_DIR
from tests.cluster.frontend.http_rig import (
    TEXT,
    WEATHER,
    beginning,
    events,
    http_frontend,
    numbered,
    post,
    served,
    served_tiny,
    tiny_text,
    together,
)
from tests.cluster.frontend.rig import PROMPT as WORDS, PROMPT_IDS as WORD_IDS, Context, stream
from tests.cluster.scripted import joined

PROMPT = "def add(a, b):\n"
SCHEMA = WEATHER["parameters"]


async def whole(app: FastAPI, **fields: Any) -> dict[str, Any]:
    answer = await post(app, "completions", **fields)
    assert answer.status == 200, answer.body
    choices = answer.json["choices"]
    assert len(choices) == 1
    return dict(choices[0])


GUIDED = {"guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar"}
RENAMED: dict[str, set[str]] = {
    "prompt_token_ids": {"prompt"},
    "max_new_tokens": {"max_tokens", "max_completion_tokens"},
    "cache_salt": {"cache_salt", "user"},
    "json_schema": {"response_format", "structured_outputs", "json_schema", *GUIDED},
    **{key: {"structured_outputs"} for key in ("choice", "grammar")},
    "regex": {"structured_outputs", "regex"},
    "grammar": {"structured_outputs", "ebnf"},
    "logprobs": {"logprobs", "top_logprobs"},
    "prompt_logprobs": {"prompt_logprobs", "echo"},
    **{key: {"tool_choice"} for key in ("tool_mode", "tool_name")},
    "request_id": {"header x-request-id"},
}
"""Fields of gRPC that HTTP has by other names, or by several; the rest have the same name."""
GRPC_ONLY = {"speculation", "draft_len", "timeout_s"}
HTTP_OF_GRPC = {
    name: RENAMED.get(name, {name})
    for name in pb.GenerateRequest.DESCRIPTOR.fields_by_name
    if name not in GRPC_ONLY
}
HTTP_ONLY = {
    "model": "a gRPC port serves one",
    "stream": "gRPC has two calls",
    "stream_options": "an End has the usage",
    "return_token_ids": "gRPC always does",
    "return_tokens_as_token_ids": "gRPC has no names of tokens",
    "truncation_side": "gRPC keeps the end",
    "input_ids": "messages alone are a prompt",
    "kv_transfer_params": "of other servers' routers",
    "functions": "another name of tools",
    "function_call": "another name of tool_choice",
    "reasoning_effort": "an option of the chat template",
    "enable_thinking": "an option of the chat template",
    "separate_reasoning": "gRPC has a field for reasoning",
    "stream_reasoning": "gRPC tells of it as it comes",
    "speculative_decoding_stats": "an End always has them",
}
PARTS: list[tuple[list[type[BaseModel]], Descriptor, set[str]]] = [
    ([Message], pb.ChatMessage.DESCRIPTOR, {"function_call", "reasoning_content"}),
    ([Function], pb.Tool.DESCRIPTOR, set()),
    ([CallTurn, CalledFunction], pb.ToolCall.DESCRIPTOR, {"type", "index", "function"}),
]
"""What is within a request has the same names over both, but for these, of HTTP alone."""


def fields_of(*models: type[BaseModel]) -> set[str]:
    return {name for model in models for name in model.model_fields}


def test_both_edges_have_the_fields_of_one_table() -> None:
    over_http = set[str]().union(*HTTP_OF_GRPC.values()) - {"header x-request-id"}
    assert over_http | HTTP_ONLY.keys() == fields_of(CompletionRequest, ChatRequest)
    assert not over_http & HTTP_ONLY.keys()
    for models, message, http_only in PARTS:
        assert fields_of(*models) - http_only == {field.name for field in message.fields}


IDS = {"prompt_token_ids": {"ids": [766, 639, 8]}}
ALONE = {"structured_outputs": {"json": SCHEMA}}
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TAG = {"begin": "The ", "schema": {"enum": ["f", "g"]}, "end": "()"}
TAGS = {"structures": [TAG], "triggers": ["Th"]}
CONTENT = {"type": "json_schema", "json_schema": TAG["schema"]}
FORMAT = {
    "type": "triggered_tags",
    "triggers": ["Th"],
    "tags": [{"begin": "The ", "content": CONTENT, "end": "()"}],
}
TAGGED = """start: (lead rest)* REST
lead[lazy]: /(?s:.*)Th/
rest: "e " %json {"enum": ["f", "g"]} "()"
REST: /(?s:.*)/ & ~/(?s:.*)Th(?s:.*)/"""
ONE = {"type": "const_string", "value": 'a/b "c"'}
LETTERS = {"type": "regex", "pattern": "[a-z]{3,9}/"}
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"choice": {"texts": [ONE["value"]]}}, ONE),
    ({"json_schema": json.dumps(SCHEMA)}, {"type": "json_schema", "json_schema": SCHEMA}),
    ({"regex": "[a-z]{3,9}/"}, LETTERS),
    ({"regex": "[a-z]{3,9}/"}, {"type": "regex", "pattern": r"[a-z]{3,9}\/"}),
    (
        {"grammar": 'start: "<" /[a-z]{3,9}\\// ">" "a/b \\"c\\""'},
        {
            "type": "sequence",
            "elements": [{"type": "tag", "begin": "<", "content": LETTERS, "end": ">"}, ONE],
        },
    ),
    ({"regex": "[a-z]{3,9}/"}, {"type": "or", "elements": [LETTERS, LETTERS]}),
]
"""Structures, and structural tags that bind a whole text to the same."""


def tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


SAME = [
    ({"repetition_penalty": 1.4}, {}),
    ({"frequency_penalty": 1.0, "presence_penalty": -0.5}, {}),
    ({"logit_bias": {"70": 12.0, "71": -100.0}}, {}),
    ({"min_tokens": 20, "ignore_eos": True}, {}),
    ({"bad_words": ["function", "used"]}, {}),
    ({"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 3}, {}),
    ({"stop": ["used"]}, {}),
    ({"stop": ["used"], "include_stop_str_in_output": True}, {}),
    ({"ignore_eos": True, "logit_bias": {"1": 100}, "skip_special_tokens": False}, {}),
    ({"allowed_token_ids": [65, 70, 90, 199]}, {}),
    ({"truncate_prompt_tokens": 2}, {}),
    ({"stop_token_ids": [65]}, {}),
    ({"committed_token_ids": [199, 456]}, {}),
    (IDS, {"prompt": IDS["prompt_token_ids"]["ids"]}),
    ({"json_schema": json.dumps(SCHEMA)}, ALONE),
    ({"json_schema": json.dumps(SCHEMA)}, {"response_format": JSON}),
    ({"json_schema": '{"type": "object"}'}, {"response_format": {"type": "json_object"}}),
    ({"regex": "[a-z]{3,9}"}, {"structured_outputs": {"regex": "[a-z]{3,9}"}}),
    ({"choice": {"texts": ["yes", "no"]}}, {"structured_outputs": {"choice": ["yes", "no"]}}),
    ({"json_schema": '{"type": "object"}'}, {"structured_outputs": {"json_object": True}}),
    ({"json_schema": json.dumps(SCHEMA)}, {"guided_json": SCHEMA}),
    ({"json_schema": '{"type": "object"}'}, {"guided_json_object": True}),
    ({"json_schema": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    ({"regex": "[a-z]{3,9}"}, {"guided_regex": "[a-z]{3,9}"}),
    ({"regex": "[a-z]{3,9}"}, {"regex": "[a-z]{3,9}"}),
    ({"choice": {"texts": ["yes", "no"]}}, {"guided_choice": ["yes", "no"]}),
    ({"grammar": 'start: "a" "b"+'}, {"guided_grammar": 'start: "a" "b"+'}),
    ({"grammar": 'start: "a" "b"+'}, {"ebnf": 'root ::= "a" "b"+'}),
    *((bound, {"response_format": tag(form)}) for bound, form in FORMS),
    ({"grammar": TAGGED}, {"structured_outputs": {"structural_tag": TAGS}}),
    ({"grammar": TAGGED}, {"response_format": {"type": "structural_tag"} | TAGS}),
    ({"grammar": TAGGED}, {"response_format": {"type": "structural_tag", "format": FORMAT}}),
    ({"grammar": 'start: "a" "b"+'}, {"structured_outputs": {"grammar": 'start: "a" "b"+'}}),
]
ELSEWHERE = {"prompt", "max_new_tokens", "messages", "chat_template_kwargs", "priority"}
ELSEWHERE |= {"include_reasoning", "thinking_token_budget"}
ELSEWHERE |= {"tools", "tool_mode", "tool_name", "parallel_tool_calls"}
ELSEWHERE |= {"add_generation_prompt", "continue_final_message", "chat_template", "documents"}
ELSEWHERE |= {"add_special_tokens", "logprob_token_ids"}
ELSEWHERE |= {"logprobs", "prompt_logprobs", "cache_salt", "request_id", "n"}
"""Fields of both whose effect the tests of chats, tools, reasoning, priorities,
choices and log-probabilities show."""


async def test_both_edges_give_the_same_tokens_for_the_same_fields() -> None:
    """And other ones than without them, so that none is ignored."""
    async with served_tiny() as (made, app):
        plain = (await whole(app, prompt=PROMPT, max_tokens=24, temperature=0))["text"]

        async def agree(fields: dict[str, Any], http_fields: dict[str, Any]) -> None:
            given = {"prompt": PROMPT} if fields is not IDS else {}
            asked = ParseDict(given | fields, pb.GenerateRequest(max_new_tokens=24))
            options = {"prompt": PROMPT, "temperature": 0} | (http_fields or fields)
            answer, said = await asyncio.gather(
                made.Generate(asked, Context()),
                whole(app, max_tokens=24, return_token_ids=True, **options),
            )
            assert said["token_ids"] == list(answer.token_ids), fields
            assert said["text"] == answer.text
            if "min_tokens" not in fields:
                assert said["text"] != plain, fields

        await asyncio.gather(*(agree(*same) for same in SAME))
    named = {name for fields, _ in SAME for name in fields} | ELSEWHERE
    assert named == HTTP_OF_GRPC.keys()


async def test_both_edges_give_the_same_choices() -> None:
    fields = {"prompt": PROMPT, "temperature": 1, "seed": 2**63 - 2, "n": 3}
    async with served_tiny() as (made, app):
        several = pb.GenerateRequest(**fields, max_new_tokens=24)
        first = await made.Generate(several, Context())
        chunks = await stream(made, several, Context())
        said = await post(app, "completions", **fields, max_tokens=24, return_token_ids=True)
        answers = zip([first, *first.others], said.json["choices"], strict=True)
        for index, (answer, choice) in enumerate(answers):
            assert answer.index == choice["index"] == index
            assert (answer.text, answer.token_ids) == (choice["text"], choice["token_ids"])
            own = [chunk for chunk in chunks if chunk.index == index]
            assert joined(own) == (choice["text"], choice["token_ids"])
            assert [chunk.HasField("end") for chunk in own] == [False] * (len(own) - 1) + [True]
            assert own[-1].end.seed == answer.end.seed == (fields["seed"] + index) % 2**63
        assert [chunk.HasField("seed") for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
        assert chunks[0].seed == fields["seed"]


async def test_log_probabilities_are_those_of_transformers_on_both_edges() -> None:
    async with served_tiny() as (made, app):
        fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 3}
        said = await whole(app, **fields, echo=True, return_token_ids=True)
        ids = said["prompt_token_ids"] + said["token_ids"]
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(TARGET_DIR).eval()
            plain = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        told = said["logprobs"]
        assert len(told["tokens"]) == len(ids)
        assert "".join(told["tokens"]) == said["text"]
        assert said["text"].startswith(PROMPT)
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        rows = list(zip(*told.values(), strict=True))
        for place, (token, logprob, top, offset) in enumerate(rows):
            assert said["text"][offset:].startswith(token)
            if place == 0:
                continue
            assert logprob == pytest.approx(float(plain[place - 1, ids[place]]), abs=1e-4)
            # As lm-eval finds out whether the token is the greedy one.
            greedy = int(plain[place - 1].argmax()) == ids[place]
            assert (max(top.values()) == logprob) == greedy
            assert top[token] == logprob
            assert next(iter(top)) == token
        asked = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=12, logprobs=3, prompt_logprobs=3)
        answer = await made.Generate(asked, Context())
        both = [*answer.end.prompt_logprobs, *answer.logprobs]
        assert [answer.logprob for answer in both] == told["token_logprobs"][1:]
        chunks = [chunk async for chunk in made.GenerateStream(asked, Context())]
        assert [logprob for chunk in chunks for logprob in chunk.logprobs] == list(answer.logprobs)
        whole_stream = Continuation(asked)
        seen = [whole_stream.take(chunk) for chunk in chunks]
        assert [logprob for each in seen if each for logprob in each.logprobs] == list(
            answer.logprobs
        )
        streamed = await post(app, "completions", **fields, stream=True, echo=True)
        [parts] = together(numbered(streamed))["choices"].values()
        assert parts["text"] == said["text"]
        assert parts["logprobs"] == rows
        count = len(said["prompt_token_ids"])
        of_prompt = {name: each[:count] for name, each in told.items()}
        scored = await whole(app, prompt=PROMPT, max_tokens=0, logprobs=3, echo=True)
        assert scored["text"] == PROMPT
        assert scored["finish_reason"] == "length"
        assert scored["logprobs"] == of_prompt
        nothing_new = {"max_tokens": 0, "stream": True, "echo": True}
        streamed = await post(app, "completions", **fields | nothing_new)
        [all_of_it] = [event["choices"][0] for event in events(streamed)]
        assert (all_of_it["text"], all_of_it["logprobs"]) == (PROMPT, of_prompt)
        assert all_of_it["finish_reason"] == "length"
        asked.max_new_tokens = 0
        alone = await made.Generate(asked, Context())
        assert alone.end.prompt_logprobs == answer.end.prompt_logprobs
        assert not alone.token_ids
        assert alone.end.usage.completion_tokens == 0
        one_more = await whole(app, prompt=PROMPT, max_tokens=1, prompt_logprobs=0)
        assert one_more["prompt_logprobs"][0] is None
        beside = await whole(app, prompt=PROMPT, max_tokens=1, prompt_logprobs=1)
        for token, entry in zip(ids[1:count], beside["prompt_logprobs"][1:], strict=True):
            assert next(iter(entry)) == str(token)
            assert len(entry) == (1 if entry[str(token)]["rank"] == 1 else 2)
            assert any(each["rank"] == 1 for each in entry.values())
        fields |= {"prompt_logprobs": 0, "max_tokens": 1, "stream": True}
        parts = [event["choices"][0] for event in events(await post(app, "completions", **fields))]
        assert parts[0].pop("prompt_logprobs") == one_more["prompt_logprobs"]
        assert not any("prompt_logprobs" in part for part in parts)
        values = [next(iter(entry.values())) for entry in one_more["prompt_logprobs"][1:]]
        assert [value["logprob"] for value in values] == told["token_logprobs"][1:count]
        assert [value["decoded_token"] for value in values] == told["tokens"][1:count]


async def test_the_usage_counts_what_of_a_prompt_was_there_already() -> None:
    async with served_tiny() as (_made, app):
        for cached in (0, 48):
            answer = await post(app, "completions", prompt=PROMPT * 8, max_tokens=1)
            usage = answer.json["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


async def test_committed_tokens_that_the_grammar_does_not_allow_are_refused() -> None:
    async with served_tiny() as (_made, app):
        fields = {"prompt": "x = ", "seed": 1, "structured_outputs": {"choice": ["ja", "nein"]}}
        for ids, status in ((list(tiny_text().encode("ja")[:1]), 200), ([130, 200], 400)):
            answer = await post(app, "completions", **fields, committed_token_ids=ids)
            assert answer.status == status
        assert answer.json["error"]["param"] == "committed_token_ids"


@pytest.mark.parametrize("told", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}])
async def test_committed_tokens_may_have_ended_the_answer(told: dict[str, Any]) -> None:
    async with served_tiny() as (_made, app):
        ids = list(tiny_text().encode("the end"))
        said = await whole(app, prompt=PROMPT, seed=1, committed_token_ids=ids, stop="end", **told)
        of_prompt = said.get("prompt_logprobs") or said["logprobs"]["token_logprobs"]
        assert of_prompt == [None] * len(tiny_text().encode(PROMPT))
        assert said["finish_reason"] == "stop"


# --------------------------------------------------------------------------- echo


BEGIN = "<s>"
"""That token has the id 0; a text becomes tokens with one before it."""


@pytest.mark.parametrize(
    ("prompt", "echo", "hidden"),
    [
        (WORDS, WORDS, 1),
        (BEGIN + WORDS, BEGIN + WORDS, 1),
        ([0, *WORD_IDS, 0], BEGIN + WORDS + BEGIN, 0),
    ],
)
async def test_an_echo_has_the_special_tokens_that_were_given(
    prompt: str | list[int], echo: str, hidden: int
) -> None:
    """`hidden`: tokens that are not in the echo."""
    async with http_frontend(text=replace(TEXT, encoder=beginning())) as app:
        asked = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
        [choice] = (await post(app, "completions", **asked)).json["choices"]
        assert choice["text"] == echo
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == BEGIN * hidden + echo
        at = 0
        for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
            assert offset == at
            at += len(token) if echo.startswith(token, at) else 0
        assert at == len(echo)


async def test_special_tokens_of_an_answer_take_no_place_in_its_text() -> None:
    async with served_tiny() as (_made, app):
        asked: dict[str, Any] = {"prompt": "x = ", "max_tokens": 3, "logprobs": 0}
        asked |= {"ignore_eos": True, "logit_bias": {str(tiny_text().eos_token_ids[0]): 100}}
        [choice] = (await post(app, "completions", **asked)).json["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == ("", [0, 0, 0])


async def test_whole_answers_to_several_prompts_each_repeat_their_own() -> None:
    fields: dict[str, Any] = {"prompt": [WORDS, WORD_IDS[:1]], "n": 2, "echo": True}
    fields |= {"max_tokens": 20, "temperature": 1, "seed": 5}
    async with served() as (_made, app):
        alone = (await post(app, "completions", **fields | {"echo": False})).json["choices"]
        answer = (await post(app, "completions", **fields)).json
        echoed, usage = answer["choices"], answer["usage"]
        first = TEXT.tokenizer.decode(WORD_IDS[:1])
        for echo, plain, other in zip([WORDS] * 2 + [first] * 2, alone, echoed, strict=True):
            assert other == plain | {"text": echo + plain["text"]}
        assert [choice["index"] for choice in echoed] == [0, 1, 2, 3]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(WORD_IDS) + 1, 80)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_is_looked_for_behind_the_echo(stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": WORDS, "max_tokens": 60, "temperature": 0}
    async with served() as (_made, app):
        plain = (await post(app, "completions", **fields)).json["choices"][0]["text"]
        for stop, said in (
            (plain[20:23], plain[: plain.index(plain[20:23])]),
            (WORDS, plain),
            (WORDS[-1:] + plain[:2], plain),
        ):
            answer = await post(app, "completions", **fields, echo=True, stop=stop, stream=stream)
            parts = events(answer) if stream else [answer.json]
            choices = [part["choices"][0] for part in parts]
            assert "".join(choice["text"] for choice in choices) == WORDS + said
            assert choices[-1]["finish_reason"] == ("length" if said == plain else "stop")


async def test_an_answer_says_which_of_its_tokens_were_drafted() -> None:
    config = from_args({"scheduler": {"draft_len": 4}, "frontend": {"coalesce_ms": 1}})
    asked = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 0}
    async with served_tiny(config=config) as (_, app):
        told = await whole(app, **asked, speculative_decoding_stats=True)
        stats, drafted = told["speculative_decoding_stats"], told["drafted"]
        # Every step ends in a token of the target's own; at the limit it may be cut.
        assert len(drafted) == len(told["logprobs"]["tokens"])
        assert stats["num_drafts"] - 1 <= drafted.count(False) <= stats["num_drafts"] + 1
        assert drafted.count(True) == stats["num_accepted_tokens"] > 0
        assert sum(stats["num_accepted_tokens_per_pos"]) == stats["num_accepted_tokens"]
        assert stats["num_draft_tokens"] >= stats["num_accepted_tokens"]
        untold = await whole(app, **asked)
        assert {"drafted", "speculative_decoding_stats"}.isdisjoint(untold)
        assert untold["text"] == told["text"]
        answer = await post(
            app, "completions", **asked, stream=True, speculative_decoding_stats=True
        )
        chunks = [event["choices"][0] for event in events(answer)]
        assert [flag for chunk in chunks for flag in chunk["drafted"]] == drafted
        assert chunks[-1]["speculative_decoding_stats"] == stats
