"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema, field_validator

from cluster.error_messages import shown_value
from cluster.frontend.http_api.bodies.generation import GenerationRequest
from cluster.frontend.prompts import Prompt, TextPrompt, TokenPrompt

_NEW_TOKENS = 16
"""As OpenAI has it."""


_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_ONE = {"anyOf": [{"type": "string"}, _IDS]}
_PROMPT = {"anyOf": [*_ONE["anyOf"], {"type": "array", "items": _ONE, "minItems": 1}]}
"""As the OpenAPI document says it."""


class CompletionRequest(GenerationRequest):
    logprobs_field: ClassVar = "logprobs"
    prompt: Annotated[tuple[str | tuple[int, ...], ...], WithJsonSchema(_PROMPT)]
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_or_more_prompts(cls, given: Any) -> tuple[str | tuple[int, ...], ...]:
        one = isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0]))
        prompts = [given] if one else given
        if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
            raise ValueError(
                "must be a text, a list of token ids, or a list of either, is " + shown_value(given)
            )
        return tuple(each if isinstance(each, str) else tuple(each) for each in prompts)

    @property
    def default_limit(self) -> int | None:
        return _NEW_TOKENS

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return tuple(
            TextPrompt(each, self.add_special_tokens)
            if isinstance(each, str)
            else TokenPrompt(each)
            for each in self.prompt
        )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_id, value)))
