"""Requests of OpenAI's API. What is not supported is refused by its name, never ignored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, field_validator, model_validator

from cluster.error_messages import Strict, shown_value, validated
from cluster.frontend.admission.control import Caller
from cluster.frontend.calls import GenerateCall
from cluster.frontend.http_api.openai_fields import (
    Message,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    without_nulls,
)
from cluster.frontend.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from cluster.frontend.status_codes import Refusal
from cluster.frontend.structure import Structure
from cluster.frontend.tools import Tool, ToolChoice, ToolUse
from scheduler.errors import InvalidRequest
from scheduler.messages import Priority

UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
"""Names that other servers know, and the values that ask for nothing: with those, and with null,
they are taken."""


class _Request(Strict, BaseModel):  # BaseModel is named for the linter, which looks no further
    logprobs_field: ClassVar[str]
    """The field that says how many likeliest tokens are told of."""
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    priority: Literal["high", "normal", "low"] | None = None
    user: str = ""
    cache_salt: str = ""
    logit_bias: dict[str, float] = {}
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    bad_words: list[str] = []
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    committed_token_ids: list[int] = []

    @field_validator("logit_bias")
    @classmethod
    def _ids_as_texts(cls, biases: dict[str, float]) -> dict[str, float]:
        for token in biases:
            if not (token.isascii() and token.isdigit() and len(token) < 20):
                raise ValueError(f"the keys must be token ids, one is {shown_value(token)}")
        return biases

    @model_validator(mode="after")
    def _what_goes_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("structured_outputs: response_format is given as well")
        return self

    @property
    @abstractmethod
    def top_logprobs_wanted(self) -> int | None:
        """Of each new token; None: no log-probabilities."""

    @property
    def echoes(self) -> bool:
        """Whether the text begins with the prompt."""
        return False

    @property
    def structure(self) -> Structure | None:
        """What the new text must be."""
        asked = self.response_format or self.structured_outputs
        return None if asked is None else asked.structure

    @property
    def tool_use(self) -> ToolUse | None:
        return None

    @property
    def structure_field(self) -> str:
        """The field that says what the text must be."""
        return "structured_outputs" if self.response_format is None else "response_format"

    @property
    def limit(self) -> tuple[str, int | None]:
        """The name and the value of the most new tokens."""
        return "max_tokens", self.max_tokens

    @property
    @abstractmethod
    def prompts(self) -> tuple[Prompt, ...]:
        """As they were given, in order."""

    def to_call(self, caller: Caller, request_id: str) -> GenerateCall:
        """Raises InvalidRequest."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        given |= {
            "priority": None if self.priority is None else Priority[self.priority.upper()],
            # -1 is other servers' word for all.
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "cache_salt": self.cache_salt or self.user,
            "logit_bias": {int(token): bias for token, bias in self.logit_bias.items()},
            "prompt_logprobs": self._prompt_logprobs,
        }
        return GenerateCall(
            caller=caller,
            prompts=self.prompts,
            choices=self.n,
            request_id=request_id,
            max_new_tokens=self.limit[1],
            structure=self.structure,
            tools=self.tool_use,
            logprobs=self.top_logprobs_wanted,
            **given,
        )

    @property
    def _prompt_logprobs(self) -> int | None:
        # Without new tokens a call asks for what the target says of its prompt.
        if self.echoes and (self.top_logprobs_wanted is not None or self.max_tokens == 0):
            return max(self.top_logprobs_wanted or 0, self.prompt_logprobs or 0)
        return self.prompt_logprobs

    def renamed(self, refusal: Refusal) -> Refusal:
        """The refusal with the names of these fields."""
        names = {
            "max_new_tokens": self.limit[0],
            "prompt_token_ids": "prompt",
            "request_id": "x-request-id",
            "cache_salt": "cache_salt" if self.cache_salt else "user",
            "logprobs": self.logprobs_field,
        }
        if self.prompt_logprobs is None:
            # The prompt's are asked for with its echo.
            names["prompt_logprobs"] = self.logprobs_field
        if refusal.field in ("json_schema", "regex", "choice", "grammar"):
            names[refusal.field] = self.structure_field
        field = names.get(refusal.field, refusal.field)
        rest = refusal.message.removeprefix(f"{refusal.field}: ")
        message = f"{field}: {rest}" if refusal.field else refusal.message
        return Refusal(refusal.code, message, refusal.retry_after_s, field)


_SAME = [field.name for field in fields(GenerateCall) if field.name in _Request.model_fields]
"""What a call has by the same name."""


class CompletionRequest(_Request):
    logprobs_field: ClassVar = "logprobs"
    prompt: tuple[str | tuple[int, ...], ...]
    logprobs: int | None = None
    echo: bool = False

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
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return tuple(
            TextPrompt(each) if isinstance(each, str) else TokenPrompt(each) for each in self.prompt
        )


class ChatRequest(_Request):
    logprobs_field: ClassVar = "top_logprobs"
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _what_chat_fields_need(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: max_completion_tokens is given as well")
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        turns = [turn.for_template for turn in self.messages]
        return (ChatPrompt.of(turns, self.tool_use, self.chat_template_kwargs),)

    @property
    def tool_use(self) -> ToolUse | None:
        return ToolUse.of(self.tools, self.tool_choice, self.parallel_tool_calls)


AnyRequest = CompletionRequest | ChatRequest


def parse_request(model: type[AnyRequest], fields: dict[str, Any]) -> AnyRequest:
    """Raises InvalidRequest, which names the parameter."""
    for name, value in fields.items():
        if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
            raise InvalidRequest(name, "not supported")
    given = {name: value for name, value in fields.items() if name not in UNSUPPORTED}
    return validated(model, without_nulls(given))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_id, value)))
