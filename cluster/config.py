"""Settings of a Lockstep cluster, frozen and validated; an unknown key is an error that names it.

Reads neither files nor the environment; see `cluster.config_sources`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.error_messages import joined, problems
from cluster.parser_names import ReasoningParser, ToolCallParser
from replicas.config import ReplicaConfig
from scheduler.config import SchedulerConfig
from scheduler.scaling import AutoscalingConfig
from scheduler.validation import SEED_MAX

LogFormat = Literal["text", "json"]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PoolConfig(_Settings):
    """The actor that holds the pool."""

    shards: int = Field(
        1,
        ge=1,
        le=256,
        description="Number of pools, each a process with its own share of the replicas, for more"
        " batches per second than one process can schedule.",
    )
    move_s: float = Field(
        1.0,
        ge=0.05,
        description="How long requests wait in a shard that does not answer, or has no replica"
        " that can hold them, before they move to another shard.",
    )
    unreachable_s: float = Field(
        120.0,
        gt=0,
        description="Silence of the pool after which requests end with UNAVAILABLE. Ray notices a"
        " lost node after 5 to 20 s, and then starts the pool elsewhere; on a busy machine the"
        " start may take another 30 s.",
    )
    lease_s: float = Field(
        3.0,
        gt=0,
        description="Silence after which a replica, a frontend or a pool counts as lost; each"
        " sends a sign of life every third of this time.",
    )

    @property
    def beat_s(self) -> float:
        """How often a replica and a frontend show that they live."""
        return self.lease_s / 3


class FrontendConfig(_Settings):
    """Limits and defaults of requests and answers."""

    number: int = Field(1, ge=1, description="Number of frontend processes.")
    max_new_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum of new tokens for requests without a limit. Null: the rest of the"
        " context (in OpenAI's completions: 16).",
    )
    timeout_s: float = Field(600.0, gt=0, description="Deadline of requests that set none.")
    prompt_bytes_max: int = Field(1 << 20, ge=1, description="Longest prompt text, in UTF-8.")
    sequences_max: int = Field(128, ge=1, description="Maximum of sequences in one call.")
    logprobs_max: int = Field(
        1 << 20,
        ge=1,
        description="Maximum of log-probabilities in one call: for each token with"
        " log-probabilities, 1 + the number of alternatives. A frontend holds about 150 bytes for"
        " a token and 8 for an alternative.",
    )
    coalesce_ms: float = Field(20.0, ge=0, description="Minimum time between chunks of a stream.")
    requests_max: int = Field(10_000, ge=1, description="Requests in flight per frontend.")
    message_bytes_max: int = Field(
        4 << 20, ge=1024, description="Maximum size of a request: gRPC message or HTTP body."
    )
    request_templates: bool = Field(
        False,
        description="Whether a request may bring its own chat template, which runs within the"
        " bounds of all templates.",
    )
    bounded_s_max: float = Field(
        2.0,
        ge=0.01,
        description="CPU seconds that the check of a structure (a JSON schema, an expression, a"
        " grammar) or the rendering of a chat template may take.",
    )
    bounded_mb_max: int = Field(512, ge=16, description="Memory in MB that either may take.")
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="How the target marks its reasoning; `auto` reads it from the chat template.",
    )
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description="How the target writes tool calls; `auto` renders a call with the chat"
        " template and reads it back.",
    )


class ServerConfig(_Settings):
    """Where Serve's proxies listen. Its gRPC proxy always listens on all interfaces."""

    served_model_name: str | None = Field(
        None,
        min_length=1,
        description="Name of the model in OpenAI's API. Null: the target's name.",
    )
    log_format: LogFormat = Field(
        "text", description="Format of the log: text, or one JSON object per line."
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="What happens to unknown names in HTTP bodies: ignore them and list them in"
        " the answer's header x-lockstep-ignored, or refuse the request.",
    )
    return_tokens_as_token_ids: bool = Field(False, description="Logprobs name tokens by ids.")
    enable_force_include_usage: bool = Field(False, description="Every stream event has the usage.")
    root_path: str = Field(
        "",
        pattern="^(/[^/]+)*$",
        description="Prefix of all HTTP paths that a proxy in front does not remove, such as /llm."
        " Paths without the prefix are served, too.",
    )
    grpc_port: int = Field(9000, ge=1, le=65535, description="Port of the gRPC proxy.")
    http_host: str = Field("127.0.0.1", min_length=1, description="Address of the HTTP proxy.")
    http_port: int = Field(8000, ge=1, le=65535, description="Port of the HTTP proxy.")
    http_hosts: tuple[str, ...] = Field(
        (),
        description="Host names (lower case, no port) that HTTP clients may use for a server"
        " without API keys. IP addresses and localhost are always allowed.",
    )
    http_origins: tuple[str, ...] = Field(
        (),
        description="Web pages that may call the server, by the browser's Origin:"
        " https://chat.example.com.",
    )


class AuthConfig(_Settings):
    """Who is served. Without any of these settings: calls from the server's own machine."""

    keys_file: str | None = Field(
        None,
        pattern="^/",
        description="Absolute path of the file of API keys, on the machine of every frontend; see"
        " `lockstep keys`. With it every request needs a key.",
    )
    api_key_sha256: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 in hex of a single API key, in place of a file of keys; `lockstep"
        " serve --api-key` sets it.",
    )
    allow_anyone: bool = Field(False, description="Serve every caller without a key.")

    @property
    def has_keys(self) -> bool:
        """Whether every request needs a key."""
        return self.keys_file is not None or self.api_key_sha256 is not None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} contradict each other")
        return self


class AuditConfig(_Settings):
    """Decode finished requests again while replicas are idle, to show that only the target decided
    their output."""

    share: float = Field(
        0.0, ge=0, le=1, description="Share of the finished requests to audit; 0: none."
    )


class TraceConfig(_Settings):
    """Traces of calls by OpenTelemetry."""

    endpoint: str | None = Field(
        None,
        description="URL for traces by OTLP over HTTP, such as http://localhost:4318/v1/traces."
        " Null: no traces.",
    )
    share: float = Field(
        0.01, ge=0, le=1, description="Share of the calls without a `traceparent` that are traced."
    )


class ActorsConfig(_Settings):
    """Resources that processes request from Ray. CPUs are Ray's bookkeeping and limit nothing."""

    replica_cpus: float = Field(
        0.1, ge=0, description="CPUs per replica, or per rank with tensor_parallel."
    )
    replica_gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs per replica, or per rank. Null: 1 for device cuda, 0 for cpu and cuda:N;"
        " for auto, the GPUs that Ray knows at deploy time divided among the replicas, at most 1"
        " each (0 if Ray does not run yet, as with `serve run`).",
    )
    ranks_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "STRICT_PACK",
        description="Ray's placement strategy for the ranks of a tensor_parallel replica."
        " STRICT_PACK: all on one machine; PACK: on as few machines as possible.",
    )
    frontend_cpus: float = Field(0.01, ge=0, description="CPUs per frontend; 0: not spread.")
    surge: bool | None = Field(
        None,
        description="Whether a change starts a new replica beside the one that it replaces;"
        " otherwise the old one ends first. Null: yes if Ray has a place for one more at deploy"
        " time.",
    )
    start_s: float = Field(
        600.0,
        gt=0,
        description="How long `lockstep serve` waits for the first replica, and `lockstep demo`"
        " for all. Serve's own commands do not read it.",
    )
    drain_s: float = Field(20.0, gt=0, description="Time to finish work for a process that ends.")
    batch_s_max: float = Field(
        120.0, gt=0, description="A batch that takes longer hangs; its replica is replaced."
    )


class ClusterConfig(_Settings):
    """Everything. A setting is named by its section and field: `replica.target`."""

    replicas: int = Field(1, ge=1, description="Number of replicas if `autoscaling` is null.")
    autoscaling: AutoscalingConfig | None = Field(
        None, description="Number of replicas by load, in place of `replicas`."
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=SEED_MAX,
        description="Seed of sampled requests that set none, which makes their answers"
        " reproducible. Null: a fresh seed for each.",
    )
    replica: ReplicaConfig = ReplicaConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    pool: PoolConfig = PoolConfig()
    frontend: FrontendConfig = FrontendConfig()
    server: ServerConfig = ServerConfig()
    auth: AuthConfig = AuthConfig()
    actors: ActorsConfig = ActorsConfig()
    audit: AuditConfig = AuditConfig()
    trace: TraceConfig = TraceConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        gpus = self.actors.replica_gpus
        if self.replica.tensor_parallel > 1 and gpus and gpus < 1:
            raise ValueError(
                f"actors.replica_gpus: a rank needs a GPU of its own, not {gpus:g} of one"
            )
        most = self.scheduler.timeout_s_max
        if self.frontend.timeout_s > most:
            raise ValueError(
                f"frontend.timeout_s: must be at most scheduler.timeout_s_max ({most:g}), is"
                f" {self.frontend.timeout_s:g}"
            )
        most = self.scheduler.draft_len_max
        said = self.replica.drafting.num_speculative_tokens
        if said is not None and said > most:
            raise ValueError(
                "replica.speculative_config.num_speculative_tokens: must be at most"
                f" scheduler.draft_len_max ({most}), is {said}"
            )
        return self

    @property
    def replicas_min(self) -> int:
        """Replicas that are there without any load."""
        return self.autoscaling.min_replicas if self.autoscaling else self.replicas

    @property
    def replicas_max(self) -> int:
        return self.autoscaling.max_replicas if self.autoscaling else self.replicas

    @property
    def model_name(self) -> str:
        """What clients of OpenAI's API call the model."""
        return self.server.served_model_name or self.replica.target

    @property
    def planned_replica(self) -> ReplicaConfig:
        """A replica's settings; its memory is to last for the scheduler's batches."""
        fixed = self.scheduler.draft_len
        largest = {
            "plan_rows": self.scheduler.rows_max,
            "plan_draft_len": self.scheduler.draft_len_max if fixed is None else fixed,
            "plan_prefill_rows": self.scheduler.prefill_rows_max,
        }
        missing = {key: size for key, size in largest.items() if getattr(self.replica, key) is None}
        return self.replica.model_copy(update=missing)

    @property
    def pool_name(self) -> str:
        """Name of the pool: settings that cannot share one get one each."""
        replica = self.replica
        parts = [
            *(replica.target, replica.dtype, replica.context_len),
            *(self.scheduler.model_dump(), self.pool.model_dump()),
        ]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return f"pool-{digest[:8]}"

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Names of the pool's actors, one per shard."""
        if self.pool.shards == 1:
            return (self.pool_name,)
        return tuple(f"{self.pool_name}-{shard}" for shard in range(self.pool.shards))


_FIELDS = {
    name: type(field.default).model_fields
    for name, field in ClusterConfig.model_fields.items()
    if isinstance(field.default, BaseModel)
}
SECTIONS = tuple(_FIELDS)
"""Settings that hold settings and are never null."""
RENAMED: Mapping[str, str] = {
    "replica.draft": "speculative_config",
    "replica.speculative": "speculative_config",
    "replica.kv_blocks": "num_gpu_blocks_override",
    "replica.kv_memory_mb": "memory",
    "replica.gpu_share": "gpu_memory_utilization",
    "replica.rows": "plan_rows",
    "replica.draft_len": "plan_draft_len",
    "scheduler.batch_size": "rows_max",
}
"""Settings that are no more, and what in the same section says the same now."""
INSTEAD: Mapping[str, str] = {
    **RENAMED,
    **{path.split(".")[1]: f"{path.split('.')[0]}.{name}" for path, name in RENAMED.items()},
    **{name: f"{section}.{name}" for section, fields in _FIELDS.items() for name in fields},
}
"""Names that are refused, with what to use: those above, and fields outside their section."""


class ConfigError(ValueError):
    """Settings that make no sense; the message names each key."""

    problems: tuple[tuple[str, str], ...] = ()
    """The path of each wrong setting, and what is wrong with it, where that is known."""

    @classmethod
    def of(cls, error: ValidationError) -> Self:
        found = problems(error, ClusterConfig, INSTEAD)
        made = cls(joined(found))
        made.problems = found
        return made
