"""The oracle: greedy output equals transformers' `generate` of the target alone, in float32, and
sampled output that of the same request alone without drafting; token for token.

Every architecture and the embedded pair, batch size, draft length, mixed lengths, staggered
arrival. What else may draft, and with what faults, is in test_drafters. That a choice follows the
target's law is shown in tests/replicas/sampling.
"""

from __future__ import annotations

import pytest

from cluster.local.engine import LocalEngine
from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason, Request
from tests.oracle.worlds import DEMO, check_answers, greedy_answers, replica_for, sampled_answers
from tests.reference import plain_greedy
from tests.tiny_pairs import ARCHITECTURES, target_model, tiny_replica

RUNS = ((1, 5), (3, 0), (8, 8), (16, None))
DEMO_RUNS = ((8, 3), (16, None))
PAIRS = [
    *((architecture, *run) for architecture in ARCHITECTURES for run in RUNS),
    *(pytest.param(DEMO, *run, marks=pytest.mark.long) for run in DEMO_RUNS),
]


@pytest.mark.parametrize(("architecture", "rows_max", "draft_len"), PAIRS)
def test_greedy_output_equals_plain_generate(
    architecture: str, rows_max: int, draft_len: int | None
) -> None:
    answered = greedy_answers(architecture)
    outputs = check_answers(replica_for(architecture), answered, rows_max, draft_len, rows_max)
    assert {output.reason for output in outputs} == {FinishReason.LENGTH}
    drafted = sum(output.usage.draft_tokens for output in outputs)
    accepted = sum(output.usage.accepted_tokens for output in outputs)
    if draft_len == 0:
        assert drafted == 0
    elif draft_len is not None:
        least = 0.3 if architecture == DEMO else 0.0
        assert least < accepted / drafted < 1, "the pair must see acceptance and rejection"


@pytest.mark.parametrize(("architecture", "rows_max", "draft_len"), PAIRS)
def test_sampled_output_depends_on_the_request_alone(
    architecture: str, rows_max: int, draft_len: int | None
) -> None:
    """Trap 12, end to end: neither batch mates nor k nor arrival change a sampled token."""
    answered = sampled_answers(architecture)
    check_answers(replica_for(architecture), answered, rows_max, draft_len, seed=rows_max)


def test_layers_that_are_not_joined_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.models.decoder.MAKES", ())
    check_answers(tiny_replica("glm4"), greedy_answers("glm4"), 8, 3)


def test_a_chat_goes_on_where_it_ended() -> None:
    """Each turn's prompt is all that was said before, and most of it is still there."""
    engine = LocalEngine(tiny_replica("llama"), SchedulerConfig(draft_len=3), check=True)
    said = (5, 9, 1, 7, 3)
    found = []
    for turn in range(4):
        (output,) = engine.generate([Request(f"t{turn}", said, 20)])
        assert output.tokens == plain_greedy(target_model("llama"), said, 20)
        found.append((output.usage.cached_tokens, len(said)))
        said += (*output.tokens, 4, 2)
    for cached, length in found[1:]:
        assert length - 12 <= cached < length
