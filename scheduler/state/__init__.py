"""The records of a pool: sequences, replicas, what may happen to them, and the invariants."""

from scheduler.state.invariants import check_pool
from scheduler.state.pipeline import InFlight, Pipeline
from scheduler.state.pool import Pool
from scheduler.state.prefixes import PrefixSet, block_keys
from scheduler.state.ready_rows import ReadyRows, Row
from scheduler.state.replica import BatchFigures, Replica
from scheduler.state.sequence import (
    Answer,
    Chunk,
    Move,
    Sequence,
    State,
    answers_of,
    finished_before_start,
)

__all__ = [
    "Answer",
    "BatchFigures",
    "Chunk",
    "InFlight",
    "Move",
    "Pipeline",
    "Pool",
    "PrefixSet",
    "ReadyRows",
    "Replica",
    "Row",
    "Sequence",
    "State",
    "answers_of",
    "block_keys",
    "check_pool",
    "finished_before_start",
]
