"""From a GenerateRequest to a call, and from the end of a sequence to an End."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from cluster.frontend.admission.control import Caller
from cluster.frontend.calls import (
    ChatPrompt,
    GenerateCall,
    Prompt,
    SequenceEnd,
    TextPrompt,
    TokenPrompt,
)
from cluster.frontend.structure import Structure
from cluster.frontend.tools import (
    CallDelta,
    CallTurn,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    ToolUse,
    json_object,
)
from cluster.sentences import validated
from protos import lockstep_pb2 as pb
from scheduler.decoding import TokenLogprobs
from scheduler.errors import InvalidRequest
from scheduler.messages import FinishReason, Priority

_FINISH_REASONS: Mapping[FinishReason, pb.FinishReason] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.FAILED: pb.FINISH_REASON_FAILED,
}

_PRIORITIES: Mapping[int, Priority | None] = {
    pb.PRIORITY_UNSPECIFIED: None,
    pb.PRIORITY_HIGH: Priority.HIGH,
    pb.PRIORITY_NORMAL: Priority.NORMAL,
    pb.PRIORITY_LOW: Priority.LOW,
}

_TOOL_MODES: Mapping[int, ToolChoice] = {
    pb.TOOL_MODE_UNSPECIFIED: "auto",
    pb.TOOL_MODE_NONE: "none",
    pb.TOOL_MODE_REQUIRED: "required",
}

_M = TypeVar("_M", bound=BaseModel)


def to_call(
    message: pb.GenerateRequest, caller: Caller, stream: bool, bytes_max: int
) -> GenerateCall:
    """Raises InvalidRequest for what a call cannot hold."""
    if (size := message.ByteSize()) > bytes_max:
        raise InvalidRequest("request", f"{size} bytes, at most {bytes_max} allowed")
    has = message.HasField
    try:
        priority = _PRIORITIES[message.priority]
    except KeyError:
        raise InvalidRequest("priority", f"{message.priority} names no class") from None
    draft_len = message.draft_len if has("draft_len") else None
    if has("speculation") and not message.speculation:
        draft_len = 0
    tools = _tool_use(message)
    return GenerateCall(
        caller=caller,
        prompts=(_prompt(message, tools),),
        tools=tools,
        choices=message.n if has("n") else 1,
        stream=stream,
        request_id=message.request_id,
        priority=priority,
        timeout_s=message.timeout_s if has("timeout_s") else None,
        max_new_tokens=message.max_new_tokens if has("max_new_tokens") else None,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if has("top_p") else 1.0,
        min_p=message.min_p,
        seed=message.seed if has("seed") else None,
        stop=message.stop,
        stop_token_ids=message.stop_token_ids,
        ignore_eos=message.ignore_eos,
        draft_len=draft_len,
        committed_token_ids=message.committed_token_ids,
        cache_salt=message.cache_salt,
        logit_bias=message.logit_bias,
        repetition_penalty=message.repetition_penalty if has("repetition_penalty") else 1.0,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        min_tokens=message.min_tokens,
        bad_words=message.bad_words,
        structure=_structure(message),
        logprobs=message.logprobs if has("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if has("prompt_logprobs") else None,
    )


def _prompt(message: pb.GenerateRequest, tools: ToolUse | None) -> Prompt:
    """Raises InvalidRequest unless it is given in exactly one form."""
    form = message.WhichOneof("input")
    for name in ("tools", "chat_template_kwargs"):
        if getattr(message, name) and not message.messages:
            raise InvalidRequest(name, "only with messages")
    if form and message.messages:
        raise InvalidRequest("messages", f"{form} is given as well; exactly one is allowed")
    if message.messages:
        turns = [_turn(f"messages.{at}", one) for at, one in enumerate(message.messages)]
        options = _json_object(message.chat_template_kwargs, "chat_template_kwargs")
        return ChatPrompt(turns, () if tools is None else tools.for_template, options)
    if form == "prompt_token_ids":
        return TokenPrompt(message.prompt_token_ids.ids)
    if form == "prompt":
        return TextPrompt(message.prompt)
    raise InvalidRequest("prompt", "one of prompt, prompt_token_ids and messages must be given")


def _turn(place: str, turn: pb.ChatMessage) -> dict[str, Any]:
    """As a chat template wants it. Raises InvalidRequest."""
    said: dict[str, Any] = {"role": turn.role, "content": turn.content}
    said |= {name: value for name in ("name", "tool_call_id") if (value := getattr(turn, name))}
    if turn.tool_calls:
        said["tool_calls"] = [
            _validated(
                CallTurn,
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}},
                f"{place}.tool_calls.{at}",
            ).for_template
            for at, call in enumerate(turn.tool_calls)
        ]
    return said


def _tool_use(message: pb.GenerateRequest) -> ToolUse | None:
    """Raises InvalidRequest."""
    tools = []
    for at, tool in enumerate(message.tools):
        place = f"tools.{at}"
        given = {field.name: value for field, value in tool.ListFields()}
        if tool.parameters:
            given["parameters"] = _json_object(tool.parameters, f"{place}.parameters")
        tools.append(_validated(Tool, {"type": "function", "function": given}, place))
    choice: ToolChoice
    if message.WhichOneof("tool_choice") == "tool_name":
        choice = NamedTool(type="function", function=FunctionName(name=message.tool_name))
    elif message.tool_mode in _TOOL_MODES:
        choice = _TOOL_MODES[message.tool_mode]
    else:
        raise InvalidRequest("tool_mode", f"{message.tool_mode} names no mode")
    parallel = message.parallel_tool_calls or not message.HasField("parallel_tool_calls")
    return ToolUse.of(tools, choice, parallel)


def _validated(model: type[_M], fields: dict[str, Any], place: str) -> _M:
    """Raises InvalidRequest, which names the field behind `place`."""
    try:
        return validated(model, fields)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{place}.{error.field.removeprefix('function.')}", error.reason
        ) from None


def _json_object(text: str, field: str) -> dict[str, Any]:
    """Raises InvalidRequest."""
    try:
        return json_object(text)
    except ValueError as error:
        raise InvalidRequest(field, str(error)) from None


def _structure(message: pb.GenerateRequest) -> Structure | None:
    kind = message.WhichOneof("structure")
    if kind is None:
        return None
    texts = message.choice.texts if kind == "choice" else [getattr(message, kind)]
    return Structure(kind, tuple(texts))


def to_logprobs(told: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            logprob=one.logprob,
            rank=one.rank,
            top_ids=[token for token, _ in one.top],
            top_logprobs=[logprob for _, logprob in one.top],
        )
        for one in told
    ]


def to_calls(calls: Iterable[CallDelta]) -> list[pb.ToolCall]:
    """Those that are whole now."""
    ended = [one.whole for one in calls if one.whole is not None]
    return [pb.ToolCall(name=one.name, arguments=one.arguments, id=one.id) for one in ended]


def to_end(end: SequenceEnd) -> pb.End:
    usage = end.usage
    return pb.End(
        finish_reason=_FINISH_REASONS[end.reason],
        usage=pb.Usage(
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        speculation=pb.Speculation(
            steps=usage.steps,
            draft_tokens=usage.draft_tokens,
            accepted_tokens=usage.accepted_tokens,
            accepted_at=usage.accepted_at,
        ),
        replicas=usage.replicas,
        recovered=usage.recovered,
        seed=end.seed,
        stop=end.stop,
        first_token_s=end.first_token_s,
        total_s=end.total_s,
        message=end.message,
        prompt_logprobs=to_logprobs(end.prompt_logprobs),
    )
