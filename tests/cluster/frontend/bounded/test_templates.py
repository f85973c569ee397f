"""Proves: a chat template that is no Jinja is refused when it is loaded, with the setting that it
comes from; one that fails while it renders refuses the conversation, whatever it raises.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster.config import ConfigError
from cluster.frontend.target_text import TargetText
from replicas.demo import TARGET_DIR
from tests.cluster.frontend.http_rig import ASKED, PAIR, post, served, templated

TOO_DEEP = "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", "line 1: .*endfor"),
        ("{{ messages }}\n{{ }}", "line 2: "),
        ("{{ messages | unheard_of }}", "line 1: .*unheard_of"),
        (TOO_DEEP, "maximum recursion depth"),
    ],
    ids=["unclosed", "empty", "filter", "too deep"],
)
def test_a_template_that_does_not_compile_is_refused_at_load(
    template: str, said: str, tmp_path: Path
) -> None:
    file, target = tmp_path / "own.jinja", tmp_path / "target"
    file.write_text(template)
    with pytest.raises(ConfigError, match=f"^chat_template: no chat template in Jinja: {said}"):
        TargetText.load(PAIR.model_copy(update={"chat_template": str(file)}))
    shutil.copytree(TARGET_DIR, target)
    (target / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=f"^target: no chat template in Jinja: {said}"):
        TargetText.load(PAIR.model_copy(update={"target": str(target)}))


def test_one_of_several_templates_is_refused_too(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET_DIR, target)
    (target / "chat_template.jinja").write_text("{{ messages }}")
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates" / "tool_use.jinja").write_text("{{")
    with pytest.raises(ConfigError, match=r"^target: no chat template in Jinja: line 1: "):
        TargetText.load(PAIR.model_copy(update={"target": str(target)}))


FAILING = {
    "ZeroDivisionError": "{{ 1 // 0 }}",
    "KeyError": "{{ '{a}'.format() }}",
    "OverflowError": "{{ 2.0 ** 5000 }}",
    "RecursionError": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "UndefinedError": "{{ messages[7].content.nothing }}",
    "TypeError": "{{ messages[0] + 1 }}",
    "its own": "{{ raise_exception('') }}",
}


@pytest.mark.parametrize("template", FAILING.values(), ids=FAILING)
async def test_a_template_that_fails_refuses_the_messages(template: str) -> None:
    async with served(text=templated(template), replicas=0) as (_made, app):
        for path in ("chat/completions", "/tokenize"):
            answer = await post(app, path, messages=ASKED)
            said = answer.error["message"].partition("messages: the target's chat template refuses")
            assert (answer.status, answer.error["param"]) == (400, "messages")
            assert len(said[2]) > len(" them: ")
