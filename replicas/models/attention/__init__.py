"""How attention reads a paged cache on a device: gathered, or where it lies."""

from replicas.models.attention.choice import AttentionRefused, choose_attention, invariant_attention
from replicas.models.attention.gather import GatherBackend, fused_attention
from replicas.models.attention.paged import NotPaged, PagedBackend

__all__ = [
    "AttentionRefused",
    "GatherBackend",
    "NotPaged",
    "PagedBackend",
    "choose_attention",
    "fused_attention",
    "invariant_attention",
]
