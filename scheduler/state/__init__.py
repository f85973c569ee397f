"""The records of a pool: sequences, replicas, what may happen to them, and the invariants."""

from scheduler.state.invariants import check_pool as check_pool
from scheduler.state.pool import Pool as Pool
from scheduler.state.prefixes import PrefixSet as PrefixSet, block_keys as block_keys
from scheduler.state.ready_rows import ReadyRows as ReadyRows
from scheduler.state.replica_record import (
    BatchFigures as BatchFigures,
    InFlight as InFlight,
    ReplicaRecord as ReplicaRecord,
    computed as computed,
)
from scheduler.state.sequence import (
    Answer as Answer,
    Chunk as Chunk,
    Move as Move,
    Sequence as Sequence,
    State as State,
    answers_of as answers_of,
    finished_before_start as finished_before_start,
)
