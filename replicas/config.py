"""Settings of one replica, frozen and validated; an unknown key is an error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from replicas.names import DEMO, TINY, demo_target, is_planted, parse_planted
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
        description="A smaller model, suffix decoding, an EAGLE-3 head, a one-pass head (DFlash or"
        " DSpark), a Clover-2 head, or no drafts at all."
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="Of draft_model and heads: a local directory or a hub name; a draft model may"
        " also be 'tiny' or 'planted:SHAPE', an EAGLE-3 head of a planted target 'planted:head'.",
    )
    enable_suffix_decoding: bool = Field(
        False,
        description="Of draft_model and heads: a row's draft is what followed its last tokens"
        " before, where more of that is likely right than of what the model guesses.",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=1,
        le=DRAFT_LEN_MAX,
        description="Most draft tokens per row and step; null leaves it to the scheduler.",
    )
    adaptive: bool = Field(
        True,
        description="Choose how many by measured times and acceptance; false drafts"
        " num_speculative_tokens in every step.",
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
            raise ValueError(f"model: method {self.method} needs one")
        if not of_model and self.model is not None:
            raise ValueError(f"model: method {self.method} has none, not {self.model!r}")
        if not of_model and self.enable_suffix_decoding:
            raise ValueError(f"enable_suffix_decoding: method {self.method} has no model")
        if self.draft_device and (self.method != "draft_model" or self.enable_suffix_decoding):
            raise ValueError("draft_device: for method draft_model without suffix decoding only")
        if self.method == "draft_model" and self.model and is_planted(self.model):
            parse_planted(self.model)
        if self.method == "none" and self.num_speculative_tokens is not None:
            raise ValueError("num_speculative_tokens: method none drafts nothing")
        if not self.adaptive and self.num_speculative_tokens is None:
            raise ValueError("num_speculative_tokens: needed where adaptive is false")
        return self


class ReplicaConfig(BaseModel):
    """Which target a replica holds, what drafts for it, where and how precisely."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(
        DEMO,
        min_length=1,
        validate_default=True,
        description="Target: 'smollm2', 'tiny', a local directory, a hub name (also with a"
        " revision, REPO@REVISION), a GGUF file (also as REPO:FILE of the hub) or 'planted:SHAPE'."
        " 'demo' is smollm2 where it is installed, else tiny.",
    )
    speculative_config: SpeculativeConfig | None = Field(
        None,
        description="What drafts, and how far, as"
        """ '{"method": "suffix", "num_speculative_tokens": 4}' or a method alone: draft_model,"""
        " suffix, eagle3, dflash, dspark, clover or none. Null is what goes with the target: the"
        " embedded draft model for tiny, suffix decoding for others.",
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Of weights and KV cache; float32 is the exactness reference. Auto is the"
        " checkpoint's own on a GPU and float32 on a CPU.",
    )
    deterministic: bool = Field(
        False,
        description="Output in bfloat16 and float16 too is the same whatever the batch, the draft"
        " length and the schedule; slower.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Devices that hold the target together, a part of each layer each: a rank per"
        " device, with a process of its own.",
    )
    block_size: int = Field(16, ge=1, le=1024, description="KV positions per block.")
    memory: ByteSize | None = Field(
        None,
        gt=0,
        description="Memory for weights, KV cache and buffers together, in bytes or as '20GiB'; "
        "where it is short, speculation shrinks. Null takes a share of what is free.",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Part of a GPU that is this replica's where `memory` is null; null is what Ray "
        "gives it, or all of it.",
    )
    num_gpu_blocks_override: int | None = Field(
        None,
        ge=1,
        description="Blocks of the KV cache, on any device, for tests and measurements; null takes"
        " what memory allows.",
    )
    plan_rows: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Rows of a batch that memory is to last for; null takes the scheduler's "
        "rows_max.",
    )
    plan_draft_len: int | None = Field(
        None,
        ge=0,
        le=DRAFT_LEN_MAX,
        description="Draft tokens likewise; null takes the most that the scheduler may choose.",
    )
    plan_prefill_rows: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Prompts of a prefill batch likewise; null takes the scheduler's "
        "prefill_rows_max.",
    )
    context_len: int | None = Field(
        None, ge=2, description="Longest sequence in tokens; null takes the target's own limit."
    )
    prefix_sharing: bool = Field(
        True,
        description="Keep KV blocks of equal prefixes for other requests of the same tenant and"
        " salt, also when no one uses them, as long as their place is not needed.",
    )
    prefill_chunk_tokens: int = Field(
        512,
        ge=1,
        description="Tokens of one prefill forward for each prompt that a batch may have, however"
        " they are divided among its rows; bounds its buffers.",
    )
    calibrate: bool = Field(
        True,
        description="Time a few steps and prefills when the replica has loaded, for the pool to"
        " choose draft lengths and chunks by, and warn of an EAGLE-3 head that is hardly ever right"
        " in a few short texts, where memory has room for them; without it the first requests show"
        " times, and nothing warns.",
    )
    torch_threads: int | None = Field(
        None, ge=1, description="Intra-op threads of the process; null leaves torch's choice."
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Pad passes of steps to a few fixed shapes and record them as CUDA graphs when"
        " the replica loads; auto does so on a GPU, and a CPU cannot.",
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with the weights.")
    chat_template: str | None = Field(
        None,
        pattern="^/",
        description="File with the chat template, in Jinja, on the machine of every frontend,"
        " absolute path; null takes the target's own.",
    )

    def fixed_shapes(self, device: torch.device) -> bool:
        """Whether passes of steps are padded to a few shapes."""
        return self.graphs == "on" or (self.graphs == "auto" and device.type == "cuda")

    @property
    def drafting(self) -> SpeculativeConfig:
        """What drafts: as said, else what goes with the target."""
        if self.speculative_config is not None:
            return self.speculative_config
        if self.target != TINY:
            return SpeculativeConfig(method="suffix")
        return SpeculativeConfig(method="draft_model", model=TINY)

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
            raise ValueError(f"tensor_parallel: device {self.device} is one of several; say 'cuda'")
        return self
