"""What the pool knows of one replica: its residents, its blocks, its batches, its figures.

A record, not a policy: grouping and placement read it, the pool writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from operator import add

from scheduler.messages import Batch, BatchKind, ReplicaSpec, StepResult
from scheduler.state.prefixes import PrefixSet
from scheduler.state.ready_rows import ReadyRows
from scheduler.state.sequence import Sequence, State
from scheduler.validation import blocks_needed

CAP_GROWTH = 1.01
"""By which a lowered number of rows grows with each batch of so many that is done."""


def computed(batch: Batch, result: StepResult) -> list[tuple[int, int]]:
    """The KV positions [begin, end) of each row that a prefill batch computed. They are fewer than
    it was to fill where the replica had some already."""
    reused = {row.sequence_id: row.reused for row in result.rows}
    return [
        (min(max(row.begin, reused.get(row.sequence_id, row.begin)), row.end), row.end)
        for row in batch.prefill
    ]


@dataclass(slots=True)
class BatchFigures:
    """Sums over the batches that one replica, or several, have answered."""

    busy_s: float = 0.0
    """Time in which they ran batches: committed_tokens over it is the speed under load."""
    batches: int = 0
    step_batches: int = 0
    """Those of steps; the others are prefills."""
    steps: int = 0
    row_steps: int = 0
    """Steps times rows; committed_tokens over this is the tokens per row and step."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    committed_tokens: int = 0
    spread_sum: int = 0
    """Tokens between the longest and the shortest row, over the step batches."""
    prefill_tokens: int = 0
    """KV positions that prefill batches computed."""
    reused_tokens: int = 0
    """KV positions that sequences found when they came."""

    def __add__(self, other: BatchFigures) -> BatchFigures:
        return BatchFigures(*map(add, astuple(self), astuple(other)))

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that were accepted; 0 when nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def spread_mean(self) -> float:
        """Tokens between the longest and the shortest row of a batch."""
        return self.spread_sum / self.step_batches if self.step_batches else 0.0

    def note(self, batch: Batch, result: StepResult) -> None:
        """A batch was answered. The scheduler adds the committed tokens: it knows which count."""
        self.batches += 1
        self.busy_s += result.times.total_s
        if batch.kind is BatchKind.PREFILL:
            self.prefill_tokens += sum(end - begin for begin, end in computed(batch, result))
            return
        self.step_batches += 1
        self.spread_sum += batch.spread
        self.steps += result.steps
        for row in result.rows:
            self.row_steps += row.steps
            self.draft_tokens += row.draft_tokens
            self.accepted_tokens += sum(row.accepted_at)


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
    last_quarantined: bool | None = None
    """Whether the batch that was sent last is one of rows in quarantine. None: none was sent."""

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def quarantined(self) -> bool:
        """Whether a batch of rows in quarantine is in flight: nothing goes beside it."""
        return bool(self.batches and self.last_quarantined)

    def send(self, batch: Batch, rows: list[Sequence], now_s: float) -> None:
        sent_s = None if self.batches else now_s
        self.batches[batch.id] = InFlight(batch, rows, sent_s)
        self.last_kind = batch.kind
        self.last_quarantined = rows[0].quarantined

    def long_batch(self) -> InFlight | None:
        """The batch of several steps that is in flight and was not interrupted, if there is one."""
        for flight in self.batches.values():
            if flight.batch.steps > 1 and not flight.interrupted:
                return flight
        return None


@dataclass(slots=True, eq=False)
class ReplicaRecord:
    """One incarnation of a replica."""

    id: str
    spec: ReplicaSpec
    kv_reserve: float
    """Share of a sequence's tokens to come for which blocks are reserved when it is placed."""
    draining: bool = False
    blocks_used: int = 0
    """Blocks that are taken by its residents."""
    residents: dict[str, Sequence] = field(default_factory=dict)
    """All sequences with reserved blocks, leaving ones included."""
    ready: ReadyRows = field(default_factory=ReadyRows)
    """Ready rows, but for those in quarantine."""
    quarantined: dict[str, Sequence] = field(default_factory=dict)
    """Ready rows in quarantine, the one that waits longest first; see `faults`."""
    partial: dict[str, Sequence] = field(default_factory=dict)
    """Rows between two prefill batches. None is in quarantine: those are filled in one."""
    pipeline: Pipeline = field(default_factory=Pipeline)
    rows_cap: float = math.inf
    """Batches of more rows have failed: memory may not last for them."""
    prefixes: PrefixSet = field(init=False)
    """Prefixes that it was given."""
    reserved_for: str | None = None
    """A waiting sequence: those behind it in the queue are not placed here."""
    figures: BatchFigures = field(default_factory=BatchFigures)

    def __post_init__(self) -> None:
        self.prefixes = PrefixSet(self.spec.texts_kept)

    def note_prefix(self, sequence: Sequence) -> None:
        """It has the KV of this sequence's content."""
        if self.spec.prefix_sharing:
            self.prefixes.add(sequence.block_keys(self.spec.block_size))

    def shared(self, sequence: Sequence) -> int:
        """Tokens of the sequence whose KV it has, probably."""
        # Where it has no prefix no content is hashed.
        keys = sequence.block_keys(self.spec.block_size) if len(self.prefixes) else ()
        return self.prefixes.shared(keys) * self.spec.block_size

    @property
    def load(self) -> int:
        return len(self.residents)

    @property
    def blocks_free(self) -> int:
        return self.spec.kv_blocks - self.blocks_used

    def rows_in(self, state: State) -> list[Sequence]:
        """Rows of the batches in flight that are in this state."""
        flights = self.pipeline.batches.values()
        return [row for flight in flights for row in flight.rows if row.state is state]

    @property
    def stepping(self) -> int:
        return len(self.rows_in(State.STEPPING))

    @property
    def joining(self) -> int:
        """Rows that are ready once the prefill batches in flight are done."""
        return sum(row.prefilled == row.prefill_len for row in self.rows_in(State.PREFILLING))

    def room_for(self, sequence: Sequence) -> int:
        """Blocks of tokens to reserve room for when it is placed. It may need more later, but never
        if it was preempted once: no sequence is sent back for want of blocks twice."""
        share = 1.0 if sequence.preempted else self.kv_reserve
        length = sequence.length + math.ceil(share * sequence.tokens_left)
        return blocks_needed(length, self.spec.block_size)

    def room_limit(self, sequence: Sequence) -> int:
        """Blocks of tokens that it may ever need room for."""
        return blocks_needed(sequence.length_max, self.spec.block_size)

    def give_room(self, sequence: Sequence, blocks: int) -> None:
        """The sequence has room for the tokens of so many blocks here from now on."""
        taken = self.spec.blocks_taken
        self.blocks_used += taken(blocks) - taken(sequence.blocks)
        sequence.blocks = blocks

    def lower_rows_cap(self, rows: int) -> None:
        """A batch of more rows has failed."""
        self.rows_cap = min(self.rows_cap, rows)

    def raise_rows_cap(self, batch: Batch) -> None:
        """A batch was done; after many as large as the cap, larger ones are tried again."""
        if len(batch.rows) + 1 > self.rows_cap:
            self.rows_cap *= CAP_GROWTH

    def rows_max(self, rows_max: int) -> int:
        """Rows of a batch here, where `rows_max` is the config's."""
        return int(min(rows_max, self.spec.rows_max or rows_max, self.rows_cap))

    def has_blocks(self, sequence: Sequence, beside: Iterable[Sequence] = ()) -> bool:
        """Whether its blocks are free where these come, too.

        A sequence that was preempted comes back only where no other has to go for it: else a full
        replica would prefill and preempt it for every step of the others.
        """
        taken, most = self.spec.blocks_taken, self.spec.kv_blocks
        needed = taken(self.room_for(sequence))
        reserved = self.blocks_used + sum(taken(self.room_for(other)) for other in beside)
        if reserved + needed > most:
            return False
        if not sequence.preempted:
            return True
        others = (*self.residents.values(), *beside)
        return sum(taken(self.room_limit(other)) for other in others) + needed <= most

    def could_hold(self, sequence: Sequence) -> bool:
        """Whether an empty replica of this spec has room for it."""
        return sequence.length_max <= self.spec.length_max

    def ready_again(self, sequence: Sequence) -> None:
        """No batch holds it any more; it is the youngest of the ready rows."""
        if sequence.quarantined:
            self.quarantined[sequence.id] = sequence
        else:
            self.ready.add(sequence)
