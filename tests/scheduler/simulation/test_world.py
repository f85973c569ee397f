"""In a simulated world tokens do not depend on acceptance or faults, and times are those given."""

from __future__ import annotations

from random import Random

from scheduler.messages import ReplicaSpec, Request, StepTimes
from scheduler.simulation import FaultPlan, World

SPEC = ReplicaSpec(kv_blocks=1000, block_size=4, context_len=500, vocab_size=100)


def world(acceptance: float, faults: FaultPlan | None = None) -> World:
    made = World(Random(1), lambda batch: StepTimes(total_s=0.004), faults=faults)
    made.join(0.0, "r", SPEC)
    for index in range(16):
        request = Request(str(index), (index + 1,) * (index + 1), 40)
        made.submit(0.01 * index, request, acceptance)
    return made


def test_tokens_do_not_depend_on_the_draft_or_on_faults() -> None:
    faults = FaultPlan((0.0, 0.05), duplicate=0.5, lose=0.05)
    runs = [world(0.0).run(), world(1.0).run(), world(0.6, faults).run()]
    assert len({tuple(tuple(one.tokens) for one in run.outcomes.values()) for run in runs}) == 1
    assert runs[1].ended_s < runs[0].ended_s < runs[2].ended_s


def test_a_request_is_submitted_then_has_its_first_token_then_ends() -> None:
    for outcome in world(0.7).run().outcomes.values():
        assert outcome.first_token_s is not None
        assert outcome.finished_s is not None
        assert outcome.submitted_s < outcome.first_token_s <= outcome.finished_s


def test_the_times_are_an_argument() -> None:
    slow = World(Random(1), lambda batch: StepTimes(total_s=10.0))
    slow.join(0.0, "r", SPEC)
    slow.submit(0.0, Request("a", (1,), 1))
    outcome = slow.run().outcomes["a"]
    assert outcome.finished_s is not None
    assert 20.0 < outcome.finished_s < 20.1
