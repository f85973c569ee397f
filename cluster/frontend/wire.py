"""Between the protobuf messages and the scheduler's; and the one table of status codes."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from grpc import StatusCode

from cluster.config import ClusterConfig, IngressConfig
from cluster.frontend.admission.control import NotAllowed, Unauthenticated
from cluster.frontend.calls import Refusal
from cluster.frontend.metrics import Totals
from cluster.frontend.target_text import TargetText
from cluster.pool.protocol import PoolUnreachable, PoolView
from protos import lockstep_pb2 as pb
from scheduler.draft_length.estimates import CostEstimates, Latency
from scheduler.errors import InvalidRequest, LockstepError, Overloaded
from scheduler.messages import (
    Finish,
    FinishReason,
    Priority,
    Reject,
    RejectCode,
    Request,
    SamplingParams,
)
from scheduler.status import ReplicaStatus

STATUS: Mapping[object, StatusCode] = {
    InvalidRequest: StatusCode.INVALID_ARGUMENT,
    Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    Unauthenticated: StatusCode.UNAUTHENTICATED,
    NotAllowed: StatusCode.PERMISSION_DENIED,
    PoolUnreachable: StatusCode.UNAVAILABLE,
    RejectCode.INVALID: StatusCode.INVALID_ARGUMENT,
    RejectCode.OVERLOADED: StatusCode.RESOURCE_EXHAUSTED,
    RejectCode.DUPLICATE: StatusCode.ALREADY_EXISTS,
    RejectCode.STOPPING: StatusCode.UNAVAILABLE,
    FinishReason.STOP: StatusCode.OK,
    FinishReason.LENGTH: StatusCode.OK,
    FinishReason.CANCELLED: StatusCode.CANCELLED,
    FinishReason.DEADLINE: StatusCode.DEADLINE_EXCEEDED,
    FinishReason.FAILED: StatusCode.INTERNAL,
}
"""The one table from errors, refusals and ends to status codes."""

_FINISH_REASONS: Mapping[FinishReason, pb.FinishReason] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.FAILED: pb.FINISH_REASON_FAILED,
}

_PRIORITIES: Mapping[int, Priority] = {
    pb.PRIORITY_HIGH: Priority.HIGH,
    pb.PRIORITY_NORMAL: Priority.NORMAL,
    pb.PRIORITY_LOW: Priority.LOW,
}

_SENTENCES: Mapping[FinishReason, str] = {
    FinishReason.CANCELLED: "the request was cancelled",
    FinishReason.DEADLINE: "timeout_s has passed",
    FinishReason.FAILED: "the request could not be finished",
}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as the ingress serves it."""

    request: Request
    client_id: str
    stop: tuple[str, ...]
    timeout_s: float
    sampled: bool
    token_ids_given: bool

    @property
    def seed(self) -> int | None:
        """The seed in use, for a request that samples."""
        return self.request.sampling.seed if self.sampled else None


def refusal_of_error(error: LockstepError) -> Refusal:
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
    return Refusal(STATUS.get(type(error), StatusCode.INTERNAL), str(error), retry_after_s)


def refusal_of_reject(reject: Reject, ask: Ask) -> Refusal:
    """A refusal by the pool, in the words of the client's request."""
    message = reject.message
    if reject.field:
        message = f"{_client_field(reject.field, ask.token_ids_given)}: {message}"
    return Refusal(STATUS[reject.code], message, reject.retry_after_s)


def refusal_of_finish(finish: Finish, client_id: str) -> Refusal | None:
    """None for a request that was served in full. `client_id`: the client's name for it."""
    code = STATUS[finish.reason]
    if code is StatusCode.OK:
        return None
    message = finish.message or _SENTENCES[finish.reason]
    return Refusal(code, f"request {client_id}: {message}" if client_id else message)


def rename_field(error: InvalidRequest, message: pb.GenerateRequest) -> InvalidRequest:
    """The error with the field's name in the client's request."""
    given = message.WhichOneof("input") == "prompt_token_ids"
    return InvalidRequest(_client_field(error.field, given), error.reason)


def _client_field(field: str, token_ids_given: bool) -> str:
    if field == "prompt" and token_ids_given:
        return "prompt_token_ids"
    return {"committed": "committed_token_ids", "id": "request_id"}.get(field, field)


def check_message(message: pb.GenerateRequest, config: ClusterConfig, context_len: int) -> None:
    """What can be said before tokenizing. Raises InvalidRequest.

    Long lists are refused by their length: to turn millions of ids into a tuple would take a while.
    """
    limits = config.ingress
    if (size := message.ByteSize()) > limits.message_bytes_max:
        raise InvalidRequest("request", f"{size} bytes, at most {limits.message_bytes_max} allowed")
    _check_input(message, config)
    if message.max_new_tokens > context_len:
        raise InvalidRequest(
            "max_new_tokens",
            f"{message.max_new_tokens} asked for, the context has {context_len} tokens",
        )
    for name, most in (
        ("committed_token_ids", context_len),
        ("stop_token_ids", config.scheduler.stop_token_ids_max),
        ("stop", limits.stop_strings_max),
    ):
        if (count := len(getattr(message, name))) > most:
            raise InvalidRequest(name, f"{count} given, at most {most} allowed")
    if len(message.request_id) > limits.request_id_chars_max:
        raise InvalidRequest(
            "request_id", f"at most {limits.request_id_chars_max} characters allowed"
        )
    if len(message.cache_salt) > limits.cache_salt_chars_max:
        raise InvalidRequest(
            "cache_salt", f"at most {limits.cache_salt_chars_max} characters allowed"
        )
    for stop in message.stop:
        if not stop:
            raise InvalidRequest("stop", "a stop string must not be empty")
        if len(stop) > limits.stop_string_chars_max:
            raise InvalidRequest(
                "stop",
                f"a string has {len(stop)} characters, at most "
                f"{limits.stop_string_chars_max} allowed",
            )
    for name in ("temperature", "top_p", "min_p", "timeout_s"):
        if not math.isfinite(getattr(message, name)):
            raise InvalidRequest(name, "must be a finite number")
    if message.committed_token_ids and message.temperature > 0 and not message.HasField("seed"):
        raise InvalidRequest("seed", "a sampled stream can only be continued with its seed")
    priority_of(message)


def _check_input(message: pb.GenerateRequest, config: ClusterConfig) -> None:
    match message.WhichOneof("input"):
        case None:
            raise InvalidRequest("prompt", "either prompt or prompt_token_ids must be given")
        case "prompt":
            if not message.prompt:
                raise InvalidRequest("prompt", "must not be empty")
            size, most = len(message.prompt.encode()), config.ingress.prompt_bytes_max
            if size > most:
                raise InvalidRequest("prompt", f"{size} bytes, at most {most} allowed")
        case "prompt_token_ids":
            count, most = len(message.prompt_token_ids.ids), config.scheduler.prompt_tokens_max
            if not count:
                raise InvalidRequest("prompt_token_ids", "must not be empty")
            if count > most:
                raise InvalidRequest("prompt_token_ids", f"{count} tokens, at most {most} allowed")


def priority_of(message: pb.GenerateRequest) -> Priority | None:
    """None where the request names none. Raises InvalidRequest for a number that names no class."""
    if message.priority == pb.PRIORITY_UNSPECIFIED:
        return None
    try:
        return _PRIORITIES[message.priority]
    except KeyError:
        raise InvalidRequest("priority", f"{message.priority} names no class") from None


def to_ask(
    message: pb.GenerateRequest,
    prompt: tuple[int, ...],
    text: TargetText,
    config: IngressConfig,
    tenant: str = "",
    priority: Priority = Priority.NORMAL,
) -> Ask:
    """The request that a checked message with these prompt tokens makes; may draw a seed."""
    has = message.HasField
    sampled = message.temperature > 0
    seed = message.seed if has("seed") else secrets.randbelow(1 << 63) if sampled else 0
    stop_token_ids = tuple(message.stop_token_ids)
    if not message.ignore_eos:
        stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *text.eos_token_ids)))
    draft_len = message.draft_len if has("draft_len") else None
    if has("speculation") and not message.speculation:
        draft_len = 0
    left = max(text.context_len - len(prompt), 1)
    return Ask(
        request=Request(
            id="unsent",
            prompt=prompt,
            max_new_tokens=(
                message.max_new_tokens
                if has("max_new_tokens")
                else min(config.max_new_tokens, left)
            ),
            sampling=SamplingParams(
                temperature=message.temperature,
                top_k=message.top_k,
                top_p=message.top_p if has("top_p") else 1.0,
                min_p=message.min_p,
                seed=seed,
            ),
            stop_token_ids=stop_token_ids,
            draft_len=draft_len,
            timeout_s=message.timeout_s if has("timeout_s") else config.timeout_s,
            committed=tuple(message.committed_token_ids),
            priority=priority,
            tenant=tenant,
            cache_salt=message.cache_salt,
        ),
        client_id=message.request_id,
        stop=tuple(message.stop),
        timeout_s=message.timeout_s if has("timeout_s") else config.timeout_s,
        sampled=sampled,
        token_ids_given=message.WhichOneof("input") == "prompt_token_ids",
    )


def to_end(
    finish: Finish, ask: Ask, stop: str | None, tokens: int, first_token_s: float, total_s: float
) -> pb.End:
    """The last word on a request; with a stop string the pool's reason is its cancellation."""
    usage = finish.usage
    reason = FinishReason.STOP if stop is not None else finish.reason
    return pb.End(
        finish_reason=_FINISH_REASONS[reason],
        usage=pb.Usage(
            prompt_tokens=len(ask.request.prompt),
            completion_tokens=tokens,
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
        seed=ask.seed,
        stop=stop,
        first_token_s=first_token_s,
        total_s=total_s,
        message=finish.message,
    )


def to_status(view: PoolView) -> pb.StatusResponse:
    status = view.status
    totals = Totals.of(status)
    return pb.StatusResponse(
        ready=not view.stopping and any(not replica.draining for replica in status.replicas),
        stopping=view.stopping,
        pool_incarnation=view.incarnation,
        pool_uptime_s=view.uptime_s,
        replicas=[_replica(replica) for replica in status.replicas],
        waiting=status.waiting,
        running=status.live - status.waiting,
        requests_finished=sum(status.finished.values()),
        tokens_committed=totals.committed_tokens,
        steps=totals.steps,
        row_steps=totals.row_steps,
        draft_tokens=totals.draft_tokens,
        accepted_tokens=totals.accepted_tokens,
        acceptance=totals.acceptance,
        group_spread_mean=totals.spread_mean,
        waiting_tokens=status.waiting_tokens,
        outstanding_tokens=status.outstanding_tokens,
        tokens_per_s=status.tokens_per_s,
        preempted=status.preempted,
        moved=status.moved,
        recovered=status.recovered,
        shards=[
            *(_shard(shard) for shard in view.shards),
            *(pb.ShardStatus(name=name, silent=True) for name in view.silent),
        ],
        groups=totals.groups,
        group_spread_sum=totals.spread_sum,
        kv_positions_own=totals.kv_positions_own,
        kv_positions_read=totals.kv_positions_read,
        prefill_tokens=totals.prefill_tokens,
        reused_tokens=totals.reused_tokens,
    )


def _shard(view: PoolView) -> pb.ShardStatus:
    status = view.status
    return pb.ShardStatus(
        name=view.name,
        incarnation=view.incarnation,
        uptime_s=view.uptime_s,
        serving=sum(not replica.draining for replica in status.replicas),
        waiting=status.waiting,
        running=status.live - status.waiting,
        outstanding_tokens=status.outstanding_tokens,
        tokens_per_s=status.tokens_per_s,
    )


def _replica(replica: ReplicaStatus) -> pb.ReplicaStatus:
    spec = replica.spec
    return pb.ReplicaStatus(
        id=replica.id,
        draining=replica.draining,
        residents=replica.residents,
        orders_in_flight=replica.batches_in_flight,
        kv_blocks=replica.kv_blocks_total,
        kv_blocks_free=replica.kv_blocks_total - replica.kv_blocks_used,
        block_size=spec.block_size,
        context_len=spec.context_len,
        target=spec.target,
        draft=spec.draft,
        device=spec.device,
        dtype=spec.dtype,
        vocab_size=spec.vocab_size,
        attention=spec.attention,
        arithmetic=spec.arithmetic,
        beliefs=_estimates(replica.estimates),
    )


def _estimates(found: CostEstimates) -> pb.ReplicaBeliefs:
    return pb.ReplicaBeliefs(
        draft_len=found.draft_len,
        steps=found.steps,
        step_s=found.step_s,
        round_trip_s=found.round_trip_s,
        acceptance_greedy=found.acceptance_greedy,
        acceptance_sampled=found.acceptance_sampled,
        verified=found.verified,
        apart_positions=found.apart_positions if math.isfinite(found.apart_positions) else None,
        slowdown=found.slowdown,
        draft=_latencies(found.draft),
        step=_latencies(found.step),
        prefill=_latencies(found.prefill),
    )


def _latencies(rows: tuple[Latency, ...]) -> list[pb.Latency]:
    return [pb.Latency(tokens=one.tokens, seconds=one.seconds) for one in rows]
