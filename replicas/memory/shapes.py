"""What of a target and its drafter must be known to plan memory; no weights are needed for it."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.kv_cache import BlockGroups, divided_into_groups, stores
from replicas.models import ModelShape

COPIED_MOST = 1 << 24
"""Numbers, keys and values of one layer's context, that a drafter copies at once of several
rows."""


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """What drafting takes of a replica's memory."""

    weights: int = 0
    """Bytes."""
    model: ModelShape | None = None
    """Of what has layers in the target's blocks and runs passes over them."""
    aux_layers: int = 0
    """Layers of the target whose hidden states it sees."""
    copies_context: bool = False
    """Whether its passes copy what its layers have of a row's context, COPIED_MOST numbers of
    several rows together, or one row's."""
    kept: int = 0
    """Bytes of the host's memory for what it remembers."""
    apart: bool = False
    """Whether the model, its passes and its layers are in another device's memory. They read the
    target's block tables all the same."""


@dataclass(frozen=True, slots=True)
class PairShape:
    """A target and maybe what drafts for it."""

    target: ModelShape
    target_bytes: int
    """Bytes of the weights, tied ones counted once."""
    context_len: int
    draft: DraftMemory = DraftMemory()

    @property
    def models(self) -> list[ModelShape]:
        """Those in this memory."""
        own = self.draft.model
        return [self.target] if own is None or self.draft.apart else [self.target, own]

    @property
    def weights(self) -> int:
        return self.target_bytes + self.draft.weights

    @property
    def _beside(self) -> int:
        """Keys and values of one position, of the drafter's layers."""
        return 0 if self.draft.model is None else self.draft.model.kv_numbers

    def groups(self, block_size: int) -> BlockGroups:
        """Of the target's layers; those of a drafter lie beside them in every block."""
        return divided_into_groups(
            self.target.attention, block_size, self.context_len, self._beside
        )

    def block_bytes(self, block_size: int, item: int) -> int:
        """What one block costs over all layers that lie in it; a number has `item` bytes."""
        slots = max(len(group.stores) for group in self.groups(block_size))
        numbers = sum(layer.kv_numbers for layer in stores(self.target.attention)[:slots])
        beside = 0 if self.draft.apart else self._beside
        return (numbers + beside) * block_size * item
