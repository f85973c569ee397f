"""A chat template as a text: whether it compiles, and what it makes of a conversation.

Knows no tokenizer: the special tokens that a template may write have names of their own here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.config import ConfigError

_SPECIAL_TOKENS = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}


def check_template(template: str | Mapping[str, str] | None, origin: str) -> None:
    """Compile a template, or each of several by name. `origin`: the setting that it comes from.

    Raises ConfigError, which begins with `origin`, for a template that is no Jinja.
    """
    # Imported here like transformers, which brings jinja2 along.
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    for text in template.values() if isinstance(template, Mapping) else (template,):
        no_conversation: list[Any] = []
        try:
            if text is not None:
                render_jinja_template(no_conversation, chat_template=text)
        except TemplateSyntaxError as error:
            place = f"line {error.lineno}: {error}"
            raise ConfigError(f"{origin}: no chat template in Jinja: {place}") from None
        except Exception as error:
            # Python's own compiler refuses what Jinja has read, as what is nested too deeply.
            raise ConfigError(f"{origin}: no chat template in Jinja: {error!r}") from None


def rendered(
    template: str,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    to_answer: bool = False,
) -> str:
    """The text of a conversation. `to_answer`: up to where the assistant's next turn begins.

    Raises whatever the template raises: it is a program.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], _ = render_jinja_template(
        [list(turns)],
        tools=list(tools) or None,
        chat_template=template,
        add_generation_prompt=to_answer,
        **_SPECIAL_TOKENS,
    )
    return str(text)
