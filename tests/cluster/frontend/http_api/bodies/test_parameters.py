"""Proves: the table of parameters, the models of bodies and the page of the docs name the same.

What the table calls supported is a field, and nothing else is. Names without effect, neutral values
of refused ones and unknown names are taken at every place, and no unknown name goes untold.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import BaseModel

from cluster.config_sources import from_args
from cluster.frontend.http_api.bodies import IgnoredNames, Known
from cluster.frontend.http_api.bodies.messages import (
    Block,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    MessageTurn,
    OutputConfig,
    Thinking,
)
from cluster.frontend.http_api.bodies.parameters import PARAMETERS, TOPS, Kind
from cluster.frontend.http_api.bodies.parts import (
    CallPart,
    FunctionPart,
    Message,
    StreamOptions,
    StructuredOutputs,
    TextPart,
    ToolPart,
)
from cluster.frontend.http_api.bodies.responses import (
    Item,
    Reasoning,
    ResponsesRequest,
    ResponseTool,
    TextOptions,
)
from tests.cluster.frontend.http_api.bodies.page import MODELS, PAGE, page
from tests.cluster.frontend.http_rig import (
    HERMES_TEMPLATE,
    TOOLS,
    Answer,
    events,
    numbered,
    post,
    served_tiny,
    together,
)

OBJECTS = [CallPart, FunctionPart, Message, StreamOptions, StructuredOutputs, TextPart, ToolPart]
OF_RESPONSES = [Item, Reasoning, ResponsesRequest, ResponseTool, TextOptions]
OF_MESSAGES = [Block, MessageTool, MessageTurn, MessageToolChoice, MessagesRequest]
OF_MESSAGES += [OutputConfig, Thinking]
LISTED = {Message, ToolPart}
"""Those whose fields the table has one by one."""


def fields_of(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def test_what_the_table_supports_are_the_fields_of_the_bodies() -> None:
    supported = {name for name, entry in PARAMETERS.items() if entry.kind is Kind.SUPPORTED}
    fields = set[str]()
    for model in MODELS.values():
        place = model.place if issubclass(model, Known) else ""
        own = {name for name in supported if place and name.startswith(place)}
        # What has a place of its own has it by that name.
        fields |= {place + name if place + name in own else name for name in fields_of(model)}
    for model in LISTED:
        fields |= {model.place + name for name in fields_of(model)}
    assert supported == fields
    kept = {model.place + name for model in OBJECTS for name in fields_of(model)}
    assert not (kept - supported) & PARAMETERS.keys()


def test_each_place_of_the_table_is_one_where_it_is_read() -> None:
    places = {name[: name.rindex(".") + 1] for name in PARAMETERS if "." in name}
    assert places <= {model.place for model in [*OBJECTS, *OF_RESPONSES, *OF_MESSAGES]}


def test_the_page_is_the_one_of_the_table() -> None:
    """`python -m tests.cluster.frontend.http_api.bodies.page` writes it."""
    assert PAGE.read_text() == page()


TURN: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "x = "}]}
CALLED = {"id": "c", "type": "function", "function": {"name": "time", "arguments": "{}"}}
CALLS: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALLED]}


def body_with(place: str, more: dict[str, Any]) -> dict[str, Any]:
    """A sound chat whose object at this place has more names."""
    tool = TOOLS[1]
    function, part, call = dict(tool["function"]), dict(TURN["content"][0]), dict(CALLED)
    stream_options, structured = {"include_usage": True}, {"regex": "a"}
    turn, top = TURN | {"content": [part]}, dict[str, Any]()
    tool = tool | {"function": function}
    objects = {"messages.": turn, "tools.": tool, "tools.function.": function}
    objects |= {"messages.content.": part, "messages.tool_calls.": call, "": top}
    objects |= {"stream_options.": stream_options, "structured_outputs.": structured}
    objects[place].update(more)
    messages = [turn, CALLS | {"tool_calls": [call]}]
    body = {"messages": messages, "tools": [tool], "max_tokens": 2, "temperature": 0, **top}
    if place == "structured_outputs.":
        return body | {"structured_outputs": structured}
    return body | {"stream": True, "stream_options": stream_options}


def neutral_values() -> dict[str, dict[str, Any]]:
    """Of each place."""
    found: dict[str, dict[str, Any]] = {}
    for path, entry in PARAMETERS.items():
        *_, name = path.split(".")
        place = path.removesuffix(name)
        if entry.kind is Kind.WITHOUT_EFFECT:
            found.setdefault(place, {})[name] = {"any": ["thing"]}
        elif entry.kind is Kind.REFUSED:
            found.setdefault(place, {})[name] = (entry.neutral or (None,))[-1]
    return {place: more for place, more in found.items() if not place.startswith(TOPS)}


def fill(objects: dict[str, dict[str, Any]]) -> None:
    """Give objects, by their places, all names that ask for nothing there."""
    for path, entry in PARAMETERS.items():
        *_, name = path.split(".")
        place = path.removesuffix(name)
        if place in objects and entry.kind is Kind.WITHOUT_EFFECT:
            objects[place][name] = {"any": ["thing"]}
        elif place in objects and entry.kind is Kind.REFUSED:
            objects[place][name] = (entry.neutral or (None,))[-1]


async def test_what_asks_for_nothing_is_taken_by_messages() -> None:
    block, tool = {"type": "text", "text": "x = "}, {"name": "time", "input_schema": {}}
    turn = {"role": "user", "content": [block]}
    choice, thinking, config = {"type": "auto"}, {"type": "disabled"}, dict[str, Any]()
    body: dict[str, Any] = {"messages": [turn], "tools": [tool], "tool_choice": choice}
    body |= {"max_tokens": 2, "thinking": thinking, "output_config": config}
    objects = {"anthropic.": body, "anthropic.messages.": turn, "anthropic.tools.": tool}
    objects |= {"anthropic.messages.content.": block, "anthropic.tool_choice.": choice}
    objects |= {"anthropic.thinking.": thinking, "anthropic.output_config.": config}
    assert objects.keys() == {model.place for model in OF_MESSAGES}
    fill(objects)
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        answer = await post(app, "messages", **body)
        assert answer.status == 200, answer.body
        assert "x-lockstep-ignored" not in answer.headers


async def test_what_asks_for_nothing_is_taken_by_responses() -> None:
    item = {"type": "message", "role": "user", "content": "x = "}
    tool = {"type": "function", "name": "time"}
    objects: dict[str, dict[str, Any]] = {"responses.": {"input": [item], "tools": [tool]}}
    objects |= {"responses.input.": item, "responses.tools.": tool}
    objects |= {"responses.text.": {}, "responses.reasoning.": {}}
    assert objects.keys() == {model.place for model in OF_RESPONSES}
    fill(objects)
    body = objects["responses."] | {"max_output_tokens": 2, "temperature": 0}
    body |= {"text": objects["responses.text."], "reasoning": objects["responses.reasoning."]}
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        answer = await post(app, "responses", **body)
        assert answer.status == 200, answer.body
        assert "x-lockstep-ignored" not in answer.headers


async def test_what_asks_for_nothing_is_taken_everywhere_and_not_told_of() -> None:
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        for place, more in neutral_values().items():
            answer = await post(app, "chat/completions", **body_with(place, more))
            assert answer.status == 200, (place, answer.body)
            assert "x-lockstep-ignored" not in answer.headers


def said(answer: Answer) -> tuple[str, int]:
    """The text and the tokens of the prompt."""
    [choice] = together(numbered(answer))["choices"].values()
    return choice["text"], events(answer)[-1]["usage"]["prompt_tokens"]


OPEN = ["", "messages.", "messages.content.", "messages.tool_calls.", "tools.", "tools.function."]


async def test_unknown_names_have_no_effect_and_are_told_of() -> None:
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        plain = await post(app, "chat/completions", **body_with("", {}))
        for place in OPEN:
            body = body_with(place, {"frobnicate": 1, "caf\u00e9\r\n": 2})
            answer = await post(app, "chat/completions", **body)
            assert answer.headers["x-lockstep-ignored"] == f"{place}frobnicate, ?"
            assert said(answer) == said(plain)
        whole = await post(app, "completions", prompt="x", max_tokens=1, frobnicate=1)
        tokens = await post(app, "/tokenize", prompt="x", frobnicate=1)
        refused = await post(app, "completions", prompt="x", max_tokens=0, frobnicate=1)
        assert [whole.status, tokens.status, refused.status] == [200, 200, 400]
        for answer in (whole, tokens, refused):
            assert answer.headers["x-lockstep-ignored"] == "frobnicate"


async def test_a_typing_error_is_refused_everywhere() -> None:
    mistakes = {"": "max_token", "messages.": "contents", "messages.content.": "texts"}
    mistakes |= {"messages.tool_calls.": "functions", "tools.": "functio"}
    mistakes |= {"tools.function.": "parameter"}
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        for place in OPEN:
            body = body_with(place, {mistakes[place]: "x"})
            answer = await post(app, "chat/completions", **body)
            assert answer.status == 400
            if place != "messages.content.":
                assert f"{mistakes[place]}: unknown name; did you mean" in answer.error["message"]


async def test_a_server_may_refuse_unknown_names() -> None:
    config = from_args({"frontend": {"coalesce_ms": 1}, "server": {"unknown_fields": "refuse"}})
    async with served_tiny(HERMES_TEMPLATE, config=config) as (_made, app):
        for place in OPEN:
            body = body_with(place, {"frobnicate": 1})
            assert (await post(app, "chat/completions", **body)).status == 400
        free = {"metadata": {"a": "b"}}
        assert (await post(app, "chat/completions", **body_with("", free))).status == 200


def test_the_log_tells_of_unknown_names_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    names = IgnoredNames(lambda: now_s)
    caplog.set_level(logging.WARNING)
    for now_s in (0.0, 1.0, 59.0, 61.0, 62.0):
        names.note([f"at{now_s:.0f}"])
    names.note([])
    told = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert told == ["at0", "at1, at59, at61"]


def test_objects_of_bodies_are_checked_by_the_table() -> None:
    for model in [*MODELS.values(), *OBJECTS]:
        assert issubclass(model, Known)
