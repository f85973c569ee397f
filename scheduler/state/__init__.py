"""The records of a pool: sequences, replicas, what may happen to them, and the invariants."""

from scheduler.state.invariants import check_pool
from scheduler.state.pool import Pool
from scheduler.state.prefixes import PrefixSet, block_keys
from scheduler.state.ready_rows import ReadyRows
from scheduler.state.replica_record import BatchFigures, InFlight, ReplicaRecord, computed
from scheduler.state.sequence import (
    Answer,
    Chunk,
    Move,
    Sequence,
    State,
    answers_of,
    finished_before_start,
)
