"""Proves: reasoning is parted from the rest in every format, wherever a text is cut; a prompt says
whether its answer begins within reasoning; `auto` reads the format from a chat template; the names
of the settings are those of the tables.
"""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, strategies as st

from cluster.frontend.reasoning import REASONING_FORMATS, ReasoningReader, reasoning_format
from cluster.frontend.reasoning.formats import PARSERS
from cluster.frontend.tools.formats import PARSERS as TOOL_PARSERS
from cluster.parser_names import ReasoningParser, ToolCallParser

READ = [
    ("qwen3", None, "<think>\nI see.\n</think>\n\nYes.", "I see.", "Yes."),
    ("qwen3", None, "No thought.", "", "No thought."),
    ("qwen3", None, "\n<thin", "", "\n<thin"),
    ("qwen3", None, "<think>cut off ", "cut off", ""),
    ("qwen3", None, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ("qwen3", True, "I see.\n</think>\n\nYes.", "I see.", "Yes."),
    ("qwen3", True, "<think>\nagain</think>so", "again", "so"),
    ("qwen3", True, "a < b </thin", "a < b </thin", ""),
    ("qwen3", False, "\n\nYes. ", "", "Yes. "),
    ("mistral", None, "[THINK]hm[/THINK]so", "hm", "so"),
    ("seed_oss", None, "<seed:think>hm</seed:think>so", "hm", "so"),
    ("hunyuan_a13b", None, "<think>a</think>\n<answer>\nb</answer>", "a", "b"),
    (
        "granite",
        None,
        "Here is my thought process: a Here is my response: b",
        "a",
        "b",
    ),
    (
        "gpt_oss",
        None,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        "a",
        "b",
    ),
    (
        "gpt_oss",
        None,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>c"
        "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|message|>{}",
        "ac",
        "<|channel|>commentary to=functions.f <|message|>{}",
    ),
    ("gpt_oss", None, "<|channel|>final<|message|>b<|return|>", "", "b"),
]
PARTS = ["<think>", "</think>", "<thi", "</", "a", " ", "\n", "[THINK]", "[/THINK]", "<answer>"]
PARTS += ["<|channel|>", "analysis<|message|>", "final<|message|>", "<|end|>", "<|start|>assistant"]


@pytest.mark.parametrize(("name", "opened", "text", "reasoning", "rest"), READ)
def test_reasoning_is_parted_from_the_rest(
    name: str, opened: bool | None, text: str, reasoning: str, rest: str
) -> None:
    reader = ReasoningReader(REASONING_FORMATS[name], opened)
    assert reader.push(text, ended=True) == (reasoning, rest)


@given(
    st.sampled_from(sorted(REASONING_FORMATS)),
    st.sampled_from([True, False, None]),
    st.lists(st.sampled_from(PARTS), max_size=10).map("".join),
    st.sampled_from([(True, False), (True, True), (False, False)]),
    st.data(),
)
def test_what_was_given_out_does_not_depend_on_the_cuts(
    name: str, opened: bool | None, text: str, given_out: tuple[bool, bool], data: st.DataObject
) -> None:
    form = REASONING_FORMATS[name]
    cut, by_character = (ReasoningReader(form, opened, *given_out) for _ in range(2))
    said, singly, done = ["", ""], ["", ""], 0
    for at in [*sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4))), len(text)]:
        for place, piece in enumerate(cut.push(text[done:at])):
            said[place] += piece
        for char in text[done:at]:
            for place, piece in enumerate(by_character.push(char)):
                singly[place] += piece
        assert (said, cut.within) == (singly, by_character.within)
        done = at
    whole = ReasoningReader(form, opened).push(text, ended=True)
    for place, piece in enumerate(cut.push("", ended=True)):
        said[place] += piece
    assert tuple(said) == (whole if given_out[0] else ("", text))


@pytest.mark.parametrize(
    ("name", "prompt", "opened"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "What is <think>?<|im_end|>\n<|im_start|>assistant\n", None),
        ("deepseek_r1", "assistant:", True),
        ("deepseek_r1", "assistant:<think></think>", False),
    ],
)
def test_a_prompt_says_whether_its_answer_begins_within_reasoning(
    name: str, prompt: str, opened: bool | None
) -> None:
    assert REASONING_FORMATS[name].opened_by(prompt) is opened


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ m.content.split('</think>')[-1] }}assistant<think>", "qwen3"),
        ("{{ '<|channel|>' }}{{ 'analysis' }}", "gpt_oss"),
        ("[THINK]{{ m.reasoning }}[/THINK]", "mistral"),
        ("<think></think><answer></answer>", "hunyuan_a13b"),
        ("{{ m.content }}", None),
        (None, None),
    ],
)
def test_auto_reads_the_template(template: str | None, name: str | None) -> None:
    assert reasoning_format("auto", template) is (name and REASONING_FORMATS[name])
    assert reasoning_format("none", template) is None
    assert reasoning_format("deepseek_r1", template) is REASONING_FORMATS["deepseek_r1"]


def test_the_names_of_the_settings_are_those_of_the_tables() -> None:
    assert set(get_args(ReasoningParser)) == set(PARSERS)
    assert set(get_args(ToolCallParser)) == set(TOOL_PARSERS)
