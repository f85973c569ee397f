"""Load a target and what drafts for it, and refuse what could not be served exactly.

What their layers need must have a description (`layer_reading`), and their position encoding must
not depend on what else is in the batch. What drafts is known by its `DraftSource` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters import Drafter, DraftSource, draft_source
from replicas.errors import PairRefused
from replicas.memory import MemoryPlan, PairShape, measured_passes, plan_memory
from replicas.models import (
    ModelShape,
    dtype_name,
    dtype_of,
    keep_own_part,
    layers_of,
    load_config,
    load_model,
    remember_whole,
    resolve,
    resolve_device,
    weight_bytes,
    without_storage,
)
from replicas.names import ACCEPTANCE
from scheduler.config import DRAFT_LEN_MAX


@dataclass(frozen=True)
class Pair:
    """A target, maybe what drafts for it, and what the rest must know of them. Before weights are
    read all is on the meta device."""

    target: PreTrainedModel
    draft: DraftSource | None
    context_len: int
    vocab_size: int
    """Ids in [0, vocab_size) are tokens that a prompt may hold."""
    target_name: str
    device: torch.device
    dtype: torch.dtype

    @property
    def shape(self) -> PairShape:
        """What must be known of it to plan memory."""
        sizes, size = ModelShape.of_model(self.target), weight_bytes(self.target)
        if self.draft is None:
            return PairShape(sizes, size, self.context_len)
        return PairShape(sizes, size, self.context_len, self.draft.memory)

    def plan(self, config: ReplicaConfig) -> MemoryPlan:
        """The division of what is free once it is loaded; a GPU's largest passes are measured."""
        on_gpu = self.device.type == "cuda"
        measured = measured_passes(self.target, config, self.context_len) if on_gpu else None
        return plan_memory(config, self.shape, self.device, loaded=True, passes=measured)

    def drafter(self, config: ReplicaConfig, plan: MemoryPlan) -> Drafter | None:
        """None where nothing drafts; raises PairRefused for what cannot run on the paged cache."""
        return None if self.draft is None else self.draft.drafter(self.target, config, plan)


def read_pair(config: ReplicaConfig) -> Pair:
    """Read configs and tokenizers and check that the models fit together; with `tensor_parallel`
    the target is what a rank holds.

    Raises PairRefused, or OSError for a name not found.
    """
    of_target = load_config(resolve(config.target), config, "target")
    draft = draft_source(config, of_target)
    vocab_size = of_target.vocab_size
    if draft is not None and draft.vocab_size is not None:
        vocab_size = min(vocab_size, draft.vocab_size)
    context_len = _context_len(of_target, config.context_len)
    check_positions(of_target)
    target = without_storage(of_target, config)
    keep_own_part(target, 0, config.tensor_parallel)
    layers_of(target)  # what is not served is refused before weights are read
    return Pair(
        target=target,
        draft=draft,
        context_len=context_len,
        vocab_size=int(vocab_size),
        target_name=config.target,
        device=target.device,
        dtype=dtype_of(config),
    )


def load_pair(config: ReplicaConfig, read: Pair | None = None) -> Pair:
    """Load the weights, `read` being what `read_pair` returned; raises what that raises.

    With `tensor_parallel` the target is this rank's part of it; `replicas.parallel` loads them all.
    """
    device = resolve_device(config.device)
    # Whatever can be refused is refused before gigabytes of weights are read.
    read = read or read_pair(config)
    rank = dist.get_rank() if config.tensor_parallel > 1 else 0
    path = resolve(config.target, "target", dtype_name(config))
    draft = None if read.draft is None else read.draft.load(config, device)

    def divide(model: PreTrainedModel) -> None:
        if config.tensor_parallel > 1:
            remember_whole(model)
        keep_own_part(model, rank, config.tensor_parallel)

    target = load_model(path, config, device, ACCEPTANCE, "target", divide)
    return replace(read, target=target, draft=draft, device=device)


def drafting(
    config: ReplicaConfig, plan: MemoryPlan, drafter: Drafter | None, source: DraftSource | None
) -> dict[str, Any]:
    """What a ReplicaSpec says of the drafter."""
    if drafter is None:
        return {"draft_len_max": 0}
    said = config.drafting
    most = plan.draft_len_max(said.num_speculative_tokens or DRAFT_LEN_MAX)
    if source is not None and source.draft_len_max is not None:
        most = min(most, source.draft_len_max)
    return {
        "draft": drafter.name,
        "drafter": f"suffix, {said.method}" if said.enable_suffix_decoding else said.method,
        "draft_len_max": most,
        "draft_len": None if said.adaptive else most,
    }


def check_positions(config: Any) -> None:
    """Raise PairRefused for positions that depend on what else is in the batch."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
    kinds = {
        rope.get("rope_type", "default")
        for rope in ropes
        if isinstance(rope, dict) and not _same_factors(rope)
    }
    for kind in sorted(kinds & {"dynamic", "longrope"}):
        raise PairRefused(
            f"{config.model_type}: rope_type {kind!r} depends on the longest row of a batch, so"
            " output would depend on batch mates"
        )


def _same_factors(rope: dict[str, Any]) -> bool:
    """Whether rotations have factors of their own, the same for short and for long texts."""
    factors = rope.get("short_factor")
    return factors is not None and factors == rope.get("long_factor")


def _context_len(target_config: Any, wanted: int | None) -> int:
    limit = getattr(target_config, "max_position_embeddings", None)
    if wanted is not None and limit is not None and wanted > limit:
        raise PairRefused(f"context_len: {wanted} is over the target's own limit of {limit}")
    context_len = wanted or limit
    if context_len is None:
        raise PairRefused("context_len: the target's config states no limit, so one must be given")
    return int(context_len)
