"""Whether a chat template compiles, and what it makes of known conversations when it is loaded.

Templates are programs of whoever made the checkpoint: they run in a process with bounds. Knows no
tokenizer: the special tokens that a template may write have names of their own here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cluster.config import ConfigError, FrontendConfig
from cluster.frontend.bounded.children import Children
from cluster.frontend.bounded.process import Bounds, Child, WorkRefused

_SPECIAL_TOKENS = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}

Rendering = tuple[Sequence[Mapping[str, Any]], bool]
"""The turns of a conversation, and whether its text goes on to where the assistant answers."""


def check_template(template: str | Mapping[str, str] | None, origin: str) -> None:
    """Compile a template, or each of several by name. `origin`: the setting that it comes from.

    Raises ConfigError, which begins with `origin`, for a template that is no Jinja.
    """
    texts = template.values() if isinstance(template, Mapping) else (template,)
    if given := [text for text in texts if text is not None]:
        with _renderer() as render:
            for text in given:
                try:
                    render([], {"chat_template": text})
                except WorkRefused as refused:
                    raise ConfigError(f"{origin}: no chat template in Jinja: {refused}") from None


def rendered(
    template: str, tools: Sequence[Mapping[str, Any]], conversations: Sequence[Rendering]
) -> list[str | None]:
    """The texts of conversations with these tools; None for each that the template refuses."""
    texts: list[str | None] = []
    told = {"chat_template": template, "tools": list(tools), **_SPECIAL_TOKENS}
    with _renderer() as render:
        for turns, to_answer in conversations:
            try:
                texts.append(render([list(turns)], {**told, "add_generation_prompt": to_answer}))
            except WorkRefused:
                texts.append(None)
    return texts


@contextmanager
def _renderer() -> Iterator[Callable[[Sequence[Any], Mapping[str, Any]], str]]:
    """A process of its own that renders templates, in the bounds of one request's.

    What it gives takes conversations and what else a template is told, and returns their texts,
    joined. That raises WorkRefused, Overloaded and ChildrenFailed.
    """
    defaults = FrontendConfig()
    limits = (defaults.bounded_s_max, defaults.bounded_mb_max, defaults.prompt_bytes_max)
    children = Children(lambda bounds: Child("rendering", None, bounds), Bounds(*limits), 1)

    def render(conversations: Sequence[Any], told: Mapping[str, Any]) -> str:
        made = children.run_now(json.dumps([conversations, told]).encode())
        return made.decode("utf-8", "surrogatepass")

    try:
        yield render
    finally:
        children.close()
