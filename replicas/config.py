"""Settings of one replica, frozen and validated; an unknown key is an error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from replicas.names import DEMO, SMOLLM2, SMOLLM2_HEAD, TINY, demo_target, is_planted, parse_planted
from scheduler.config import DRAFT_LEN_MAX

if TYPE_CHECKING:
    import torch


Method = Literal["draft_model", "suffix", "eagle3", "dflash", "dspark", "clover", "none"]
DRAFTING_FIELD = "speculative_config.model"
"""The setting that names the model that drafts, for messages."""


class SpeculativeConfig(BaseModel):
    """What drafts, and how far; named as vLLM names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    method: Method = Field(
        description="draft_model (a smaller model), suffix (suffix decoding), eagle3 (an EAGLE-3"
        " head), dflash or dspark (a one-pass head), clover (a Clover-2 head), or none (no"
        " drafts)."
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="The draft model or head: a local directory or a hub name. A draft model may"
        " also be 'tiny' or 'planted:SHAPE'. An EAGLE-3 head may also be 'smollm2-eagle3', which"
        " is here, and 'planted:head' for a planted target.",
    )
    enable_suffix_decoding: bool = Field(
        False,
        description="Draft by suffix decoding or by the model or head, row by row: by suffix"
        " decoding when more of its tokens are likely right.",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=1,
        le=DRAFT_LEN_MAX,
        description="Maximum of draft tokens per row and step; null leaves it to the scheduler.",
    )
    adaptive: bool = Field(
        True,
        description="Choose the number of draft tokens by measured times and acceptance rates;"
        " false drafts num_speculative_tokens in every step.",
    )
    draft_device: str | None = Field(
        None,
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="Of draft_model: a device of its own, so that one batch is drafted while the"
        " target checks another: another GPU, or beside a target on a CPU 'cpu', which is a thread"
        " of its own. Null drafts on the target's device, one after the other.",
    )

    @model_validator(mode="after")
    def _whole(self) -> SpeculativeConfig:
        of_model = self.method not in ("suffix", "none")
        if of_model and self.model is None:
            raise ValueError(f"model: method {self.method} needs a model")
        if not of_model and self.model is not None:
            raise ValueError(f"model: method {self.method} takes no model, is {self.model!r}")
        if not of_model and self.enable_suffix_decoding:
            raise ValueError(f"enable_suffix_decoding: method {self.method} has no model")
        if self.draft_device and (self.method != "draft_model" or self.enable_suffix_decoding):
            raise ValueError("draft_device: for method draft_model without suffix decoding only")
        if self.method == "draft_model" and self.model and is_planted(self.model):
            parse_planted(self.model)
        if self.method == "none" and self.num_speculative_tokens is not None:
            raise ValueError("num_speculative_tokens: method none drafts nothing")
        if not self.adaptive and self.num_speculative_tokens is None:
            raise ValueError("num_speculative_tokens: must be given if adaptive is false")
        return self


class ReplicaConfig(BaseModel):
    """Which target a replica holds, what drafts for it, where and how precisely."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(
        DEMO,
        min_length=1,
        validate_default=True,
        description="Target: 'smollm2', 'tiny', a local directory, a hub name (REPO or"
        " REPO@REVISION), a GGUF file (a path or REPO:FILE) or 'planted:SHAPE'. 'demo' is smollm2"
        " if installed, else tiny.",
    )
    speculative_config: SpeculativeConfig | None = Field(
        None,
        description="The drafter: a method alone (draft_model, suffix, eagle3, dflash, dspark,"
        """ clover, none) or JSON such as '{"method": "suffix","""
        """ "num_speculative_tokens": 4}'. Null: the embedded draft model for tiny,"""
        " suffix decoding or smollm2-eagle3, row by row, for smollm2, suffix decoding for others.",
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights and KV cache; float32 is the exactness reference. Auto: the"
        " checkpoint's own type on a GPU, float32 on a CPU.",
    )
    deterministic: bool = Field(
        False,
        description="Make output independent of batch, draft length and schedule in bfloat16 and"
        " float16, too; slower.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of devices that share the target: each holds a part of every layer, in"
        " a process of its own (a rank).",
    )
    block_size: int = Field(16, ge=1, le=1024, description="KV positions per block.")
    memory: ByteSize | None = Field(
        None,
        gt=0,
        description="Memory for weights, KV cache and buffers together, in bytes or as '20GiB'. If"
        " it is short, batches and drafts shrink. Null: a share of the free memory.",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of a GPU's memory for this replica if `memory` is null. Null: the share"
        " of the GPU that Ray gives it, or all of it.",
    )
    num_gpu_blocks_override: int | None = Field(
        None,
        ge=1,
        description="Number of KV blocks, on any device, for tests and measurements. Null: as many"
        " as memory allows.",
    )
    plan_rows: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Rows of the largest batch that the memory plan must hold. Null: the"
        " scheduler's rows_max.",
    )
    plan_draft_len: int | None = Field(
        None,
        ge=0,
        le=DRAFT_LEN_MAX,
        description="Draft tokens per row that the memory plan must hold. Null: the maximum that"
        " the scheduler may choose.",
    )
    plan_prefill_rows: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Prompts of a prefill batch that the memory plan must hold. Null: the"
        " scheduler's prefill_rows_max.",
    )
    context_len: int | None = Field(
        None,
        ge=2,
        description="Maximum length of a sequence in tokens. Null: the target's own limit.",
    )
    prefix_sharing: bool = Field(
        True,
        description="Share KV blocks of equal prefixes between requests of the same tenant and"
        " salt, and keep unused ones until their place is needed.",
    )
    prefill_chunk_tokens: int = Field(
        512,
        ge=1,
        description="Tokens per prompt of one prefill pass, on average over its prompts; bounds"
        " the pass's buffers.",
    )
    calibrate: bool = Field(
        True,
        description="After loading, time a few steps and prefills, by which the pool chooses draft"
        " lengths and chunks, and warn if a head that reads hidden states is hardly ever right."
        " Without it the first requests provide the times.",
    )
    torch_threads: int | None = Field(
        None,
        ge=1,
        description="Intra-op threads of the process. Null: the server shares the machine's cores"
        " among replicas; elsewhere torch chooses.",
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Record passes of steps as CUDA graphs at load, padded to a few fixed shapes."
        " Auto: on a GPU only; a CPU cannot.",
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the weights."
    )
    chat_template: str | None = Field(
        None,
        pattern="^/",
        description="Absolute path of a Jinja file with the chat template, on the machine of every"
        " frontend. Null: the target's own template.",
    )

    def fixed_shapes(self, device: torch.device) -> bool:
        """Whether passes of steps are padded to a few shapes."""
        return self.graphs == "on" or (self.graphs == "auto" and device.type == "cuda")

    @property
    def drafting(self) -> SpeculativeConfig:
        """What drafts: as said, else what goes with the target."""
        if self.speculative_config is not None:
            return self.speculative_config
        if self.target == TINY:
            return SpeculativeConfig(method="draft_model", model=TINY)
        if self.target == SMOLLM2:
            return SpeculativeConfig(
                method="eagle3", model=SMOLLM2_HEAD, enable_suffix_decoding=True
            )
        return SpeculativeConfig(method="suffix")

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _of_a_command_line(cls, said: Any) -> Any:
        """A text is JSON, or a method alone."""
        if not isinstance(said, str):
            return said
        if said.lstrip()[:1] != "{":
            return {"method": said.lower()}
        try:
            return json.loads(said)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None

    @field_validator("target")
    @classmethod
    def _demo_has_a_name(cls, name: str) -> str:
        return demo_target() if name == DEMO else name

    @field_validator("target")
    @classmethod
    def _a_planted_target_is_whole(cls, name: str) -> str:
        if is_planted(name):
            parse_planted(name)
        return name

    @model_validator(mode="after")
    def _fits_together(self) -> ReplicaConfig:
        if self.tensor_parallel > 1 and ":" in self.device:
            raise ValueError(
                f"tensor_parallel: device {self.device} is a single device; use 'cuda'"
            )
        if self.tensor_parallel > 1 and self.drafting.draft_device:
            raise ValueError("speculative_config.draft_device: not with tensor_parallel yet")
        return self
