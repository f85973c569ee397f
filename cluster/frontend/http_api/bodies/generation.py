"""What bodies of completions and of chat completions share, and the call that they make."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, field_validator, model_validator

from cluster.config import ServerConfig
from cluster.error_messages import shown_value
from cluster.frontend.admission.control import Caller
from cluster.frontend.calls import GenerateCall
from cluster.frontend.http_api.bodies.check import Known
from cluster.frontend.http_api.bodies.parts import ResponseFormat, StreamOptions, StructuredOutputs
from cluster.frontend.prompts import Prompt
from cluster.frontend.status_codes import Refusal
from cluster.frontend.structure import Structure
from cluster.frontend.tools import ToolUse
from scheduler.messages import Priority

_STRUCTURES: Mapping[str, str] = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""What vLLM and SGLang also have at the top, and as fields of `structured_outputs`."""
_SHOWN_MAX = 5
"""Wrong keys in a sentence."""


class GenerationRequest(Known, BaseModel):  # the linter looks no further than its bases
    logprobs_field: ClassVar[str]
    """The field that says how many likeliest tokens are told of."""
    model: str | None = None
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
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: Literal["high", "normal", "low", 0] | None = None
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
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    allowed_token_ids: list[int] = []
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] = []
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    kv_transfer_params: dict[str, Any] = {}
    speculative_decoding_stats: bool = False
    committed_token_ids: list[int] = []

    @field_validator("logit_bias")
    @classmethod
    def _ids_as_texts(cls, biases: dict[str, float]) -> dict[str, float]:
        if wrong := [token for token in biases if not _is_id(token)]:
            shown = ", ".join(map(shown_value, wrong[:_SHOWN_MAX]))
            raise ValueError(f"the keys must be token ids, not {shown}")
        return biases

    @model_validator(mode="after")
    def _what_goes_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        if len(given := self._structures) > 1:
            raise ValueError(f"{given[1]}: {given[0]} is given as well")
        _ = self.structure
        return self

    @property
    def _structures(self) -> list[str]:
        """Fields that say what the text must be."""
        names = ("response_format", "structured_outputs", *_STRUCTURES)
        return [name for name in names if getattr(self, name) not in (None, False)]

    def as_served(self, model: str, server: ServerConfig) -> Self:
        """The answer names the model that is served, and has what the server always tells."""
        told: dict[str, Any] = {} if self.model == model else {"model": model}
        if server.return_tokens_as_token_ids:
            told["return_tokens_as_token_ids"] = True
        if server.enable_force_include_usage and self.stream:
            told["stream_options"] = StreamOptions(include_usage=True, continuous_usage_stats=True)
        return self.model_copy(update=told) if told else self

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
        for name, own in _STRUCTURES.items():
            if (given := getattr(self, name)) not in (None, False):
                asked = StructuredOutputs.model_validate({own: given})
        return None if asked is None else asked.structure

    @property
    def tool_use(self) -> ToolUse | None:
        return None

    @property
    def structure_field(self) -> str:
        """The field that says what the text must be."""
        return self._structures[0]

    @property
    def default_limit(self) -> int | None:
        """The most new tokens where the body says nothing; None: as many as the context holds."""
        return None

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
            "priority": Priority[self.priority.upper()] if self.priority else None,
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
            default_new_tokens=self.default_limit,
            structure=self.structure,
            tools=self.tool_use,
            logprobs=self.top_logprobs_wanted,
            **given,
        )

    @property
    def _prompt_logprobs(self) -> int | None:
        # Without new tokens a call asks for what the target says of its prompt.
        if self.echoes and (self.top_logprobs_wanted is not None or self.max_tokens == 0):
            wanted = (self.top_logprobs_wanted or 0, self.prompt_logprobs or 0)
            # -1 asks for all.
            return min(wanted) if min(wanted) < 0 else max(wanted)
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
        return replace(refusal, message=message, field=field)


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


_SAME = [
    field.name for field in fields(GenerateCall) if field.name in GenerationRequest.model_fields
]
"""What a call has by the same name."""
