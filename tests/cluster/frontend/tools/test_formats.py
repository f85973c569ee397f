"""Proves: a template's format is the one whose reader reads back the call that the template writes,
whatever else the template says; where none does, tools are refused, and nothing else is. A template
renders for this once.
"""

from __future__ import annotations

from typing import Any

import pytest

from cluster.frontend.tools import detection, tool_format
from tests.cluster.frontend.http_rig import (
    ASKED,
    HERMES_TEMPLATE,
    LLAMA_TEMPLATE,
    TOOLS,
    post,
    served_tiny,
)

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call functions.\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nFor each call return:\\n<tool_call>\\n{"name": <function-name>, ' }}
    {{- '"arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "KEY": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
QWEN_CODER = """
{%- if tools %}
    {{- '<|im_start|>system\\nYou have functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n<function>\\n<name>' + tool.function.name + '</name>\\n<parameters>' }}
        {%- for name, fields in tool.function.parameters.properties | items %}
            {{- '\\n<name>' + name + '</name>\\n<type>' + fields.type + '</type>' }}
        {%- endfor %}
        {{- '\\n</parameters>\\n</function>' }}
    {%- endfor %}
    {{- '\\n</tools>\\nReply as:\\n<tool_call>\\n<function=name>\\n<parameter=one>\\nvalue' }}
    {{- '\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
        {%- for name, value in tool_call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' }}
            {{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('Only single calls at once.') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first and tools %}
            {{- 'Respond in the format {"name": function name, "parameters": dictionary of' }}
            {{- ' argument name and its value}. Do not use variables.\\n\\n' }}
            {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
NO_TOOLS = "{% for m in messages %}{{ m.role }}: {{ m.content + eos_token }}\n{% endfor %}"
MENTIONS = NO_TOOLS + '{# tools: <tool_call>{"name": .., "arguments": ..}</tool_call> #}'
HERMES = QWEN.replace("KEY", "arguments")
WITH_RESULT = (
    "{% if messages[-1].tool_calls %}{{ raise_exception('no result') }}{% endif %}" + HERMES
)
KNOWN = {
    "qwen": (HERMES, "hermes"),
    "by the other name": (QWEN.replace("KEY", "parameters"), "hermes"),
    "with its result": (WITH_RESULT, "hermes"),
    "the tests' own": (HERMES_TEMPLATE, "hermes"),
    "llama": (LLAMA, "llama3_json"),
    "the tests' own llama": (LLAMA_TEMPLATE, "llama3_json"),
}
CALL = "{'name': call.function.name, 'parameters': call.function.arguments}"
UNKNOWN = {
    "none": None,
    "no tools": NO_TOOLS,
    "mentions them": MENTIONS,
    "by an unknown name": QWEN.replace("KEY", "args"),
    "python's words": HERMES.replace("arguments | tojson", "arguments | string"),
    "escaped": HERMES.replace("arguments | tojson", "arguments | tojson | forceescape"),
    "drops arguments": LLAMA.replace("call.arguments | tojson", "'{}'"),
    "is not told of tools": HERMES.replace("{{- tool | tojson }}", ""),
    "a list": LLAMA_TEMPLATE.replace(CALL, f"[{CALL}]"),
    "fails at calls": "{{ tools }}{% if messages[1] %}{{ 1 // 0 }}{% endif %}",
    "fails always": "{{ tools }}{{ 1 // 0 }}",
    "does not compile": "{{ tools }}{{",
}


@pytest.mark.parametrize(("template", "form"), KNOWN.values(), ids=KNOWN)
def test_a_call_that_is_read_back_tells_the_format(template: str, form: str) -> None:
    found = tool_format("auto", template)
    assert found is not None
    assert found.name == form


@pytest.mark.parametrize("template", UNKNOWN.values(), ids=UNKNOWN)
def test_a_call_that_is_not_read_back_whole_tells_none(template: str | None) -> None:
    assert tool_format("auto", template) is None


async def test_tools_are_refused_where_the_format_is_not_known_and_no_call_is_forced() -> None:
    async with served_tiny(MENTIONS) as (_made, app):
        fields: dict[str, Any] = {"messages": ASKED, "max_tokens": 60, "temperature": 0}
        answer = await post(app, "chat/completions", **fields, tools=TOOLS)
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "a form of calls that is not known" in answer.error["message"]
        # Nothing is called where tokens are only counted.
        counted = await post(app, "/tokenize", messages=ASKED, tools=TOOLS)
        assert counted.status == 200
        plain = await post(app, "chat/completions", **fields, tools=TOOLS, tool_choice="none")
        assert plain.status == 200
        forced = await post(app, "chat/completions", **fields, tools=TOOLS, tool_choice="required")
        assert forced.json["choices"][0]["message"]["tool_calls"]


def test_a_template_renders_for_this_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def counted(template: str, *args: Any) -> list[str | None]:
        seen.append(template)
        return render(template, *args)

    render = detection.rendered
    monkeypatch.setattr(detection, "rendered", counted)
    template = HERMES + "{# only here #}"
    for _ in range(3):
        assert tool_format("auto", template) is not None
    assert len(seen) == 1
