"""How the target writes its answers: its formats of reasoning and of calls, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cluster.config import FrontendConfig
from cluster.frontend.calls import GenerateCall
from cluster.frontend.prompts import ChatPrompt
from cluster.frontend.reasoning import (
    ReasoningFormat,
    ReasoningReader,
    behind_reasoning,
    reasoning_format,
)
from cluster.frontend.structure import Markup, Structure
from cluster.frontend.target_text import TargetText
from cluster.frontend.text import shown_ids
from cluster.frontend.tools import (
    TOOL_FORMATS,
    ToolFormat,
    ToolReader,
    ToolUse,
    tool_format,
    tool_structure,
)
from scheduler.errors import InvalidRequest

_TAIL_TOKENS = 16
"""Of a prompt: what a marker at its end may take."""


@dataclass(frozen=True)
class CallFormats:
    """Those that one call needs."""

    text: TargetText
    markup: Markup
    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens that readers must see."""
        markers: tuple[str, ...] = ()
        if self.reasoning is not None:
            markers += self.reasoning.markers
        if self.tools is not None:
            markers += self.tools.markers
        return shown_ids(self.text.tokenizer, markers) if markers else frozenset()

    def opened(self, prompt: Sequence[int]) -> bool | None:
        """As of `ReasoningFormat.opened_by`."""
        assert self.reasoning is not None
        tail = list(prompt[-_TAIL_TOKENS:])
        return self.reasoning.opened_by(self.text.tokenizer.decode(tail, skip_special_tokens=False))

    def readers(
        self, opened: bool | None, call: GenerateCall
    ) -> tuple[ReasoningReader | None, ToolReader | None]:
        """Of one sequence."""
        reasoning = tools = None
        use = call.tools
        if self.reasoning is not None:
            apart, whole = call.separate_reasoning, not call.stream_reasoning
            reasoning = ReasoningReader(self.reasoning, opened, apart, whole)
        if self.tools is not None and use is not None:
            tools = ToolReader(self.tools, use.schemas, use.parallel, use.forced)
        return reasoning, tools

    def tool_structure(self, use: ToolUse, text: Structure | None) -> Structure | None:
        """What binds an answer behind its reasoning. Raises InvalidRequest."""
        assert self.tools is not None
        header = "" if self.reasoning is None else self.reasoning.header
        return tool_structure(use, self.tools, self.markup, text, header)

    def behind_reasoning(self, opened: bool | None, call: GenerateCall) -> Structure | None:
        """What binds an answer with its reasoning. Raises InvalidRequest."""
        assert self.reasoning is not None
        budget, headed = call.thinking_token_budget, call.tools is not None
        return behind_reasoning(self.reasoning, opened, call.structure, self.markup, budget, headed)


class AnswerFormats:
    """Of one target and its settings."""

    def __init__(self, text: TargetText, config: FrontendConfig) -> None:
        self._text = text
        self._reasoning = reasoning_format(config.reasoning_parser, text.chat_template)
        self._tools = tool_format(config.tool_call_parser, text.chat_template)

    @cached_property
    def markup(self) -> Markup:
        text, special = self._text, dict[str, int]()
        if text.grammars is not None:
            for token, added in text.tokenizer.get_added_tokens_decoder().items():
                if text.grammars.is_special(token):
                    special[added.content] = token
        return Markup(special)

    def of(self, call: GenerateCall) -> CallFormats:
        """Raises InvalidRequest for tools that the target cannot be told of."""
        made = CallFormats(self._text, self.markup)
        if isinstance(call.prompts[0], ChatPrompt):
            made = replace(made, reasoning=self._reasoning)
        if call.thinking_token_budget is not None and made.reasoning is None:
            reason = "the target is not known to reason; see --reasoning-parser"
            raise InvalidRequest("thinking_token_budget", reason)
        if call.tools is None:
            return made
        return replace(made, tools=self.tools(call.tools))

    def tools(self, use: ToolUse) -> ToolFormat:
        """Raises InvalidRequest."""
        if self._tools is not None:
            return self._tools
        if use.forced:  # a target that knows no tools writes what the grammar says
            return TOOL_FORMATS["llama3_json"]
        reason = (
            "the target's chat template has none, or a form of calls that is not known; see"
            " --tool-call-parser"
        )
        raise InvalidRequest("tools", reason)
