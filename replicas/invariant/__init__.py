"""Sums whose bits for a token do not depend on what is computed beside it, and the proof."""

from replicas.invariant.check import PIECE, what_changes_logits
from replicas.invariant.host_attention import HostBackend
from replicas.invariant.layout import GATHERED_MOST, SCORES_MOST, PassLayout
from replicas.invariant.modules import compute_in_tiles
from replicas.invariant.ops import COUNTS, TILE, Arithmetic, Product, aligned, can_prepack, in_tiles
from replicas.invariant.proof import VECTOR, RowFunction, prove, same_counts
