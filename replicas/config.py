"""Settings of one replica, frozen and validated; an unknown key is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from replicas.models.shapes import is_planted, parse_planted
from scheduler.config import DRAFT_LEN_MAX

if TYPE_CHECKING:
    import torch

DEMO = "demo"
"""The name of the embedded pair, wherever a directory or hub name is asked for."""


class ReplicaConfig(BaseModel):
    """Which pair a replica holds, where and how precisely."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(
        DEMO,
        min_length=1,
        description="Target: 'demo', a local directory, a hub name or 'planted:SHAPE'.",
    )
    draft: str | None = Field(
        DEMO, description="Draft, likewise; null serves the target without speculation."
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Of weights and KV cache; float32 is the exactness reference."
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
    kv_blocks: int | None = Field(
        None, ge=1, description="Blocks of the KV cache; null computes them from kv_memory_mb."
    )
    kv_memory_mb: int | None = Field(
        None, ge=1, description="Memory of the KV cache; null takes what `memory` leaves."
    )
    memory: ByteSize | None = Field(
        None,
        gt=0,
        description="Memory for weights, KV cache and buffers together, in bytes or as '20GiB'; "
        "where it is short, speculation shrinks. Null takes a share of what is free.",
    )
    gpu_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Part of a GPU that is this replica's where `memory` is null; null is what Ray "
        "gives it, or all of it.",
    )
    plan_rows: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Rows of a group that memory is to last for; null takes the scheduler's "
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
        512, ge=1, description="Tokens per row of one prefill forward; bounds its buffers."
    )
    calibrate: bool = Field(
        True,
        description="Time a few steps and prefills when the replica has loaded, for the pool to"
        " choose draft lengths and chunks by; without it the first requests show them.",
    )
    torch_threads: int | None = Field(
        None, ge=1, description="Intra-op threads of the process; null leaves torch's choice."
    )
    fuse_layers: bool = Field(
        True,
        description="Join the layers of Llama-like models into fewer operations, where the logits"
        " stay the same but for rounding; false keeps transformers' own forward pass.",
    )
    attention: Literal["auto", "gather", "flex", "varlen"] = Field(
        "auto",
        description="How keys and values are read: 'gather' copies a layer's blocks together,"
        " 'flex' (FlexAttention) and 'varlen' (FlashAttention with block tables, on GPUs) read"
        " them in place. Auto gathers on a CPU; on a GPU it times them when it loads.",
    )
    pack_weights: bool = Field(
        True,
        description="Keep the large weights of joined layers a second time on a CPU, in float32, in"
        " the layout that it multiplies fastest; not where `memory` is too short for it.",
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Pad passes of steps to a few fixed shapes and record them as CUDA graphs when"
        " the replica loads; auto does so on a GPU. On a CPU they run padded, without a recording.",
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with the weights.")

    def fixed_shapes(self, device: torch.device) -> bool:
        """Whether passes of steps are padded to a few shapes."""
        return self.graphs == "on" or (self.graphs == "auto" and device.type == "cuda")

    def attention_of(self, device: torch.device) -> str:
        """The attention to try on this device."""
        if self.attention != "auto":
            return self.attention
        # Ranks that go by their own times may choose differently.
        return "auto" if device.type == "cuda" and self.tensor_parallel == 1 else "gather"

    @field_validator("target", "draft")
    @classmethod
    def _a_planted_name_is_whole(cls, name: str | None) -> str | None:
        if name is not None and is_planted(name):
            parse_planted(name)
        return name

    @model_validator(mode="after")
    def _deterministic_has_its_own_attention(self) -> ReplicaConfig:
        if self.deterministic and self.attention in ("flex", "varlen"):
            raise ValueError(
                f"attention: deterministic output needs an attention of its own, not"
                f" {self.attention!r}; say 'auto' or 'gather'"
            )
        return self

    @model_validator(mode="after")
    def _several_devices_have_no_number(self) -> ReplicaConfig:
        if self.tensor_parallel > 1 and ":" in self.device:
            raise ValueError(f"tensor_parallel: device {self.device} is one of several; say 'cuda'")
        return self
