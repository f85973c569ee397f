"""Requests of OpenAI's API. What is not supported is refused by its name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    field_validator,
    model_validator,
)

from cluster.frontend.admission.control import Caller
from cluster.frontend.calls import ChatPrompt, GenerateCall, Prompt, TextPrompt, TokenPrompt
from cluster.frontend.status_codes import Refusal
from cluster.sentences import sentences
from scheduler.errors import InvalidRequest
from scheduler.messages import Priority

_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Names that other servers know, and the values that ask for nothing: with those, and with null,
they are taken."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    include_usage: bool = False


class _Request(_Strict):
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
    stop: tuple[str, ...] = ()
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    priority: Literal["high", "normal", "low"] | None = None
    user: str = ""
    cache_salt: str = ""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_more(cls, stop: Any) -> tuple[str, ...]:
        texts = (stop,) if isinstance(stop, str) else stop
        if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
            raise ValueError("must be a text or a list of texts")
        return tuple(texts)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        """The name and the value of the most new tokens."""
        return "max_tokens", self.max_tokens

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        raise NotImplementedError

    def to_call(self, caller: Caller, request_id: str) -> GenerateCall:
        return GenerateCall(
            caller=caller,
            prompts=self.prompts,
            choices=self.n,
            stream=self.stream,
            request_id=request_id,
            priority=None if self.priority is None else Priority[self.priority.upper()],
            max_new_tokens=self.limit[1],
            temperature=self.temperature,
            # -1 is other servers' word for all.
            top_k=max(self.top_k, 0) if self.top_k == -1 else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            cache_salt=self.cache_salt or self.user,
        )

    def renamed(self, refusal: Refusal) -> Refusal:
        """The refusal with the names of these fields."""
        names = {
            "max_new_tokens": self.limit[0],
            "prompt_token_ids": "prompt",
            "request_id": "x-request-id",
            "cache_salt": "cache_salt" if self.cache_salt else "user",
        }
        field = names.get(refusal.field, refusal.field)
        rest = refusal.message.removeprefix(f"{refusal.field}: ")
        message = f"{field}: {rest}" if refusal.field else refusal.message
        return Refusal(refusal.code, message, refusal.retry_after_s, field)


class CompletionRequest(_Request):
    prompt: tuple[str | tuple[int, ...], ...]

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_or_more_prompts(cls, given: Any) -> tuple[str | tuple[int, ...], ...]:
        one = isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0]))
        prompts = [given] if one else given
        if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
            raise ValueError("must be a text, a list of token ids, or a list of either")
        return tuple(each if isinstance(each, str) else tuple(each) for each in prompts)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return tuple(
            TextPrompt(each) if isinstance(each, str) else TokenPrompt(each) for each in self.prompt
        )


class Message(_Strict):
    role: str
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _text_of_parts(cls, content: Any) -> str:
        if isinstance(content, str):
            return content
        if isinstance(content, list) and all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            and len(part) == 2
            for part in content
        ):
            return "".join(part["text"] for part in content)
        raise ValueError("must be a text or a list of parts of type text")


class ChatRequest(_Request):
    messages: list[Message]
    max_completion_tokens: int | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
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
        return (ChatPrompt([{"role": one.role, "content": one.content} for one in self.messages]),)


AnyRequest = CompletionRequest | ChatRequest


def parse_request(model: type[AnyRequest], fields: dict[str, Any]) -> AnyRequest:
    """Raises InvalidRequest, which names the parameter."""
    given = {}
    for name, value in fields.items():
        neutral = _UNSUPPORTED.get(name)
        if neutral is not None and value is not None and value not in neutral:
            raise InvalidRequest(name, "not supported")
        if neutral is None and value is not None:
            given[name] = value
    for turn in given["messages"] if isinstance(given.get("messages"), list) else ():
        if isinstance(turn, dict):
            # Clients send an assistant's turn back with all its fields.
            for name in [name for name, value in turn.items() if value is None]:
                del turn[name]
    try:
        return model.model_validate(given)
    except ValidationError as error:
        said = sentences(error, model)
        field, colon, reason = said.partition(": ")
        raise InvalidRequest(field if colon else "request", reason or said) from None


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_id, value)))
