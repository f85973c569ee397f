"""From requests to calls; from the end of a sequence, and from what the pool says, to answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message
from pydantic import BaseModel

from cluster.error_messages import shown_value, validated
from cluster.frontend.admission.control import Caller
from cluster.frontend.calls import Delta, GenerateCall, SequenceEnd
from cluster.frontend.json_codec import parsed_json
from cluster.frontend.prompts import REASONING_NAMES, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from cluster.frontend.structure import Structure
from cluster.frontend.tools import (
    CallTurn,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    ToolUse,
    json_object,
)
from cluster.pool.protocol import PoolView
from protos import lockstep_pb2 as pb
from scheduler.decoding import TokenLogprobs
from scheduler.errors import InvalidRequest
from scheduler.messages import Priority
from scheduler.status import ReplicaStatus

_PRIORITIES: Mapping[int, Priority | None] = {
    pb.PRIORITY_UNSPECIFIED: None,
    **{pb.Priority.Value(f"PRIORITY_{priority.name}"): priority for priority in Priority},
}
_TOOL_MODES: Mapping[int, ToolChoice] = {
    pb.TOOL_MODE_UNSPECIFIED: "auto",
    pb.TOOL_MODE_NONE: "none",
    pb.TOOL_MODE_REQUIRED: "required",
}

_NAMES = {field.name for field in fields(GenerateCall)}
_SAME = [field for field in pb.GenerateRequest.DESCRIPTOR.fields if field.name in _NAMES]
"""What a call has by the same name, and as its own default where it is not given."""

_OPTIONAL = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields if field.has_presence}
_OF_CONVERSATIONS = (
    *("tools", "chat_template_kwargs", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message"),
)

_M = TypeVar("_M", bound=BaseModel)
_P = TypeVar("_P", bound=Message)


def to_call(
    message: pb.GenerateRequest, caller: Caller, stream: bool, bytes_max: int
) -> GenerateCall:
    """Raises InvalidRequest for what a call cannot hold."""
    if (size := message.ByteSize()) > bytes_max:
        raise InvalidRequest("request", f"{size} bytes, at most {bytes_max} allowed")
    if message.priority not in _PRIORITIES:
        raise InvalidRequest("priority", _not_one_of(pb.Priority, message.priority))
    tools = _tool_use(message)
    given: dict[str, Any] = {
        field.name: getattr(message, field.name)
        for field in _SAME
        if not field.has_presence or message.HasField(field.name)
    }
    if message.HasField("speculation") and not message.speculation:
        given["draft_len"] = 0
    given |= {"priority": _PRIORITIES[message.priority], "tools": tools}
    return GenerateCall(
        caller=caller,
        prompts=(_prompt(message, tools),),
        choices=message.n if message.HasField("n") else 1,
        stream=stream,
        structure=_structure(message),
        **given,
    )


def _not_one_of(values: Any, number: int) -> str:
    """A number that stands for none of the enum's `values`."""
    return f"must be one of {', '.join(values.keys())}, is {number}"


def _prompt(message: pb.GenerateRequest, tools: ToolUse | None) -> Prompt:
    """Raises InvalidRequest unless it is given in exactly one form."""
    form = message.WhichOneof("input")
    for name in _OF_CONVERSATIONS:
        given = message.HasField(name) if name in _OPTIONAL else getattr(message, name)
        if given and not message.messages:
            raise InvalidRequest(name, "only with messages")
    if form and message.messages:
        raise InvalidRequest("messages", f"{form} is given as well; exactly one is allowed")
    if message.messages:
        turns = [_turn(f"messages.{at}", turn) for at, turn in enumerate(message.messages)]
        goes_on = message.continue_final_message
        if goes_on and message.add_generation_prompt:
            raise InvalidRequest("continue_final_message", "not with add_generation_prompt")
        return ChatPrompt.of(
            turns,
            tools,
            _json_object(message.chat_template_kwargs, "chat_template_kwargs"),
            documents=_documents(message.documents),
            asks=not goes_on
            and (message.add_generation_prompt or not message.HasField("add_generation_prompt")),
            goes_on=goes_on,
            special_tokens=message.add_special_tokens,
            template=message.chat_template if message.HasField("chat_template") else None,
        )
    if form == "prompt_token_ids":
        return TokenPrompt(message.prompt_token_ids.ids)
    if form == "prompt":
        special = message.add_special_tokens or not message.HasField("add_special_tokens")
        return TextPrompt(message.prompt, special)
    raise InvalidRequest("prompt", "one of prompt, prompt_token_ids and messages must be given")


def _documents(text: str) -> list[dict[str, Any]]:
    """Raises InvalidRequest."""
    try:
        found = parsed_json(text or "[]")
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        reason = f"must be the text of a JSON array of objects, is {shown_value(text)}"
        raise InvalidRequest("documents", reason)
    return found


def _turn(place: str, turn: pb.ChatMessage) -> dict[str, Any]:
    """As a chat template wants it. Raises InvalidRequest."""
    said: dict[str, Any] = {"role": turn.role, "content": turn.content}
    said |= {name: value for name in ("name", "tool_call_id") if (value := getattr(turn, name))}
    if turn.reasoning:
        said |= dict.fromkeys(REASONING_NAMES, turn.reasoning)
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
        raise InvalidRequest("tool_mode", _not_one_of(pb.ToolMode, message.tool_mode))
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


def to_parts(delta: Delta) -> dict[str, Any]:
    """The fields of an answer or of a chunk that have this delta; of calls those that are whole."""
    calls = [call.whole for call in delta.calls if call.whole is not None]
    return {
        "index": delta.index,
        "text": delta.text,
        "reasoning": delta.reasoning,
        "token_ids": delta.tokens,
        "logprobs": _logprobs(delta.logprobs),
        "tool_calls": [pb.ToolCall(name=of.name, arguments=of.arguments, id=of.id) for of in calls],
        "end": None if delta.end is None else _end(delta.end),
    }


def _logprobs(told: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    made = []
    for said in told:
        ids, logprobs = zip(*said.top, strict=True) if said.packed else ((), ())
        made.append(
            pb.TokenLogprobs(
                logprob=said.logprob, rank=said.rank, top_ids=ids, top_logprobs=logprobs
            )
        )
    return made


def _end(end: SequenceEnd) -> pb.End:
    sources = (end, end.usage)
    return _copied(
        pb.End,
        sources,
        finish_reason=f"FINISH_REASON_{end.reason.name}",
        usage=_copied(pb.Usage, sources),
        speculation=_copied(pb.Speculation, sources),
        prompt_logprobs=_logprobs(end.prompt_logprobs),
    )


# --------------------------------------------------------------------------- status


def to_status(view: PoolView) -> pb.StatusResponse:
    status = view.status
    figures = status.figures
    return _copied(
        pb.StatusResponse,
        (view, status, figures),
        ready=not view.stopping and status.serving > 0,
        pool_incarnation=view.incarnation,
        pool_uptime_s=view.uptime_s,
        replicas=[_replica(replica) for replica in status.replicas],
        running=status.live - status.waiting,
        requests_finished=sum(status.finished.values()),
        tokens_committed=figures.committed_tokens,
        batch_spread_mean=figures.spread_mean,
        shards=[
            *(_shard(shard) for shard in view.shards),
            *(pb.ShardStatus(name=name, silent=True) for name in view.silent),
        ],
        batches=figures.step_batches,
        batch_spread_sum=figures.spread_sum,
    )


def _shard(view: PoolView) -> pb.ShardStatus:
    status = view.status
    running = status.live - status.waiting
    return _copied(pb.ShardStatus, (view, status), running=running, silent=False)


def _replica(replica: ReplicaStatus) -> pb.ReplicaStatus:
    return _copied(
        pb.ReplicaStatus,
        (replica, replica.spec, replica.figures),
        kv_blocks_free=replica.spec.kv_blocks - replica.kv_blocks_used,
        cost_estimates=_copied(pb.CostEstimates, (replica.estimates,)),
    )


def _copied(kind: type[_P], sources: Sequence[object], **others: Any) -> _P:
    """A message with `others`, and with what a source has by the name of a field."""
    for name in kind.DESCRIPTOR.fields_by_name.keys() - others.keys():
        source = next((candidate for candidate in sources if hasattr(candidate, name)), None)
        if source is not None:
            others[name] = getattr(source, name)
    return kind(**others)
