"""Sums whose bits for a token do not depend on what is computed beside it, and the proof."""

from replicas.invariant.backend import HostBackend
from replicas.invariant.check import ROWS, trial_length, what_changes_logits
from replicas.invariant.device import CHUNK, chunked_attention
from replicas.invariant.layout import GATHERED_MOST, SCORES_MOST, PassLayout
from replicas.invariant.modules import NotDeterministic, compute_in_tiles
from replicas.invariant.ops import COUNTS, TILE, Arithmetic, Product, can_prepack
from replicas.invariant.proof import RowFunction, prove

__all__ = [
    "CHUNK",
    "COUNTS",
    "GATHERED_MOST",
    "ROWS",
    "SCORES_MOST",
    "TILE",
    "Arithmetic",
    "HostBackend",
    "NotDeterministic",
    "PassLayout",
    "Product",
    "RowFunction",
    "can_prepack",
    "chunked_attention",
    "compute_in_tiles",
    "prove",
    "trial_length",
    "what_changes_logits",
]
