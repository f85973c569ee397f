"""A simulated replica objects to what a real one would, and commits the reference output."""

from __future__ import annotations

from random import Random

import pytest

from scheduler.messages import (
    Batch,
    BatchKind,
    FinishReason,
    PrefillRow,
    Release,
    ReplicaSpec,
    Request,
    Sampling,
    StepResult,
    StepRow,
    StepTimes,
)
from scheduler.simulation import SimulatedReplica, reference_output

SPEC = ReplicaSpec(kv_blocks=40, block_size=4, context_len=64, vocab_size=100)


def prefill(batch_id: int, *names: str, tokens: int = 3, left: int = 5, blocks: int = 2) -> Batch:
    rows = tuple(PrefillRow(name, (1,) * tokens, left, Sampling(), (), blocks) for name in names)
    return Batch(batch_id, "r", BatchKind.PREFILL, prefill=rows)


def steps(batch_id: int, *rows: StepRow, count: int = 1) -> Batch:
    draft_len = max(row.draft_len for row in rows)
    return Batch(batch_id, "r", BatchKind.SPECULATE, (), rows, draft_len, count)


def run(replica: SimulatedReplica, batch: Batch) -> StepResult:
    replica.receive(batch)
    replica.begin(batch)
    while replica.advance():
        pass
    return replica.end()


@pytest.fixture
def replica() -> SimulatedReplica:
    """Has filled `a`; every draft token is accepted."""
    times = StepTimes(total_s=0.1)
    replica = SimulatedReplica("r", SPEC, lambda batch: times, lambda name: 1.0, Random(0))
    run(replica, prefill(1, "a"))
    return replica


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (steps(2, StepRow("stranger", 3, 2, 10)), "not resident"),
        (steps(1, StepRow("a", 3, 2, 10)), "ids do not rise"),
        (steps(2, StepRow("a", 3, 2, 10), StepRow("a", 3, 2, 10)), "two batches at once"),
        (prefill(2, "a"), "first chunk"),
        (prefill(2, "b", "b"), "first chunk"),
        (Batch(2, "elsewhere", BatchKind.SPECULATE, rows=(StepRow("a", 3, 0, 10),)), "another"),
        (Batch(2, "r", BatchKind.SPECULATE), "rows and kind"),
        (Batch(2, "r", BatchKind.SPECULATE, rows=(StepRow("a", 3, 3, 10),), draft_len=1), "k"),
        (steps(2, StepRow("a", 4, 2, 10)), "length differs"),
        (steps(2, StepRow("a", 3, 2, 1)), "too few blocks"),
        (prefill(2, "b", blocks=39), "out of KV blocks"),
        (prefill(2, "b", left=62), "beyond the context"),
    ],
)
def test_a_batch_that_a_real_replica_could_not_run_is_an_assertion(
    replica: SimulatedReplica, batch: Batch, says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        replica.receive(batch)


def test_a_row_is_released_once_no_batch_holds_it_and_a_failed_prefill_leaves_nothing(
    replica: SimulatedReplica,
) -> None:
    for batch in (prefill(2, "b"), steps(3, StepRow("a", 3, 2, 10))):
        replica.receive(batch)
        (row,) = batch.prefill or batch.rows
        with pytest.raises(AssertionError, match="a batch holds"):
            replica.release(Release("r", (row.sequence_id,)))
        replica.fail(batch)
        assert list(replica.residents) == ["a"]
        replica.release(Release("r", (row.sequence_id,)))
    assert not replica.residents
    run(replica, prefill(4, "b", blocks=38))


def test_a_batch_ends_early_once_a_row_has_finished(replica: SimulatedReplica) -> None:
    result = run(replica, steps(2, StepRow("a", 3, 1, 10), count=10))
    (row,) = result.rows
    assert (result.steps, row.draft_tokens, row.accepted_at) == (3, 2, (2,))
    assert row.tokens == reference_output(Request("a", (1, 1, 1), 5), 100)[0]
    assert result.times.total_s == pytest.approx(0.3)


def test_the_reference_output_depends_on_content_and_seed_alone() -> None:
    request = Request("a", (1, 2, 3), 20)
    tokens, reason = reference_output(request, 100)
    assert (len(tokens), reason) == (20, FinishReason.LENGTH)
    assert reference_output(Request("b", (1, 2, 3), 20, committed=tokens[:7]), 100)[0] == tokens
    assert reference_output(Request("a", (1, 2, 4), 20), 100)[0] != tokens
    assert reference_output(Request("a", (1, 2, 3), 20, Sampling(seed=1)), 100)[0] != tokens
    stopped = Request("a", (tokens[5], 2, 3), 20, stop_token_ids=(tokens[5],))
    assert reference_output(stopped, 100)[0] != (), "a stop token of the prompt ends nothing"
