"""The kinds of prompts, before the target's tokenizer makes tokens of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field as field_of
from typing import Any, ClassVar

from cluster.frontend.tools import ToolUse

REASONING_NAMES = ("reasoning", "reasoning_content", "thinking")
"""Each chat template knows what a turn was thinking by one of these."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    field: ClassVar = "prompt"
    text: str
    special_tokens: bool = True
    """Whether those that the target expects around a text are added, such as BOS."""

    @property
    def size(self) -> int:
        """Bytes in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    field: ClassVar = "prompt_token_ids"
    ids: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    field: ClassVar = "messages"
    messages: Sequence[Mapping[str, Any]]
    """Each with `role` and `content`, and what else the template knows."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the template is told of."""
    options: Mapping[str, Any] = field_of(default_factory=dict)
    """What else the template is told, by name."""
    documents: Sequence[Mapping[str, Any]] = ()
    """Texts that a template may show."""
    asks: bool = True
    """The text goes on to where the assistant answers."""
    goes_on: bool = False
    """The text ends within the last turn, which the answer continues."""
    special_tokens: bool = False
    """Whether those that the target expects around a text are added to what the template writes."""
    template: str | None = None
    """In place of the target's own."""
    ids: Sequence[int] | None = None
    """The tokens, where the client has them already: no template is rendered."""

    @classmethod
    def of(
        cls,
        turns: Sequence[Mapping[str, Any]],
        tools: ToolUse | None,
        options: Mapping[str, Any],
        **others: Any,
    ) -> ChatPrompt:
        """`tools`: those that the target may use, if any."""
        return cls(turns, () if tools is None else tools.for_template, options, **others)

    @property
    def size(self) -> int:
        """Bytes in UTF-8; 0 without a turn."""
        parts: list[Any] = [value for turn in self.messages for value in turn.values()]
        if parts:
            parts += [*self.tools, *self.options.items(), *self.documents, self.template or ""]
        return sum(len(str(part).encode("utf-8", "replace")) for part in parts)


Prompt = TextPrompt | TokenPrompt | ChatPrompt
