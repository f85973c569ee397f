"""The batches of one replica: which are in flight, and what was sent last.

The one record that the rules of `batching.dispatch` read. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.messages import Batch, BatchKind
from scheduler.state.sequence import Sequence


@dataclass(slots=True)
class InFlight:
    """A batch that was sent and is not answered yet."""

    batch: Batch
    rows: list[Sequence]
    """Its rows, leaving ones included."""
    sent_s: float | None
    """When it was sent, if nothing else was in flight then: what passes until its answer, beside
    its run, is a round trip."""
    interrupted: bool = False


@dataclass(slots=True)
class Pipeline:
    """Batches that a replica runs one after the other."""

    batches: dict[int, InFlight] = field(default_factory=dict)
    """Batches in flight by id, in the order in which they were sent."""
    last_kind: BatchKind | None = None
    last_quarantined: bool = False
    """Whether the batch that was sent last is one of rows in quarantine."""
    failed: set[BatchKind] = field(default_factory=set)
    """Kinds of batch of which the last one that was answered failed."""

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def quarantined(self) -> bool:
        """Whether a batch of rows in quarantine is in flight. Nothing goes beside it, so it is the
        one that was sent last."""
        return self.last_quarantined and bool(self.batches)

    def send(self, batch: Batch, rows: list[Sequence], now_s: float) -> None:
        """The batch is in flight."""
        sent_s = None if self.batches else now_s
        self.batches[batch.id] = InFlight(batch, rows, sent_s)
        self.last_kind = batch.kind
        self.last_quarantined = rows[0].quarantined

    def long_batch(self) -> InFlight | None:
        """The batch of several steps that is in flight and was not interrupted, if there is one."""
        for one in self.batches.values():
            if one.batch.steps > 1 and not one.interrupted:
                return one
        return None
