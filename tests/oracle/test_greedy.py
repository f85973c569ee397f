"""The oracle: greedy output equals transformers' `generate` of the target alone, in float32.

Every architecture and the embedded pair, batch size, draft length, mixed lengths, staggered
arrival; token for token.
"""

from __future__ import annotations

import pytest

from cluster.local_engine import LocalEngine
from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason, Request
from tests.oracle.drafters import ORACLES, oracle
from tests.oracle.worlds import DEMO, check_answers, greedy_answers, replica_for
from tests.reference import plain_greedy
from tests.tiny_pairs import ARCHITECTURES, target_model, tiny_replica

RUNS = [
    *(("model", rows, k) for rows in (1, 3, 8, 16) for k in (0, 1, 3, 5, 8, None)),
    *((name, rows, k) for name in ORACLES for rows, k in ((1, 5), (8, 5), (16, 8))),
]
DEMO_RUNS = ((1, 5), (3, 0), (3, 8), (8, 3), (8, None), (16, 1), (16, 5))


@pytest.mark.parametrize(
    ("architecture", "drafter", "rows_max", "draft_len"),
    [
        *((architecture, *run) for architecture in ARCHITECTURES for run in RUNS),
        *((DEMO, "model", *run) for run in DEMO_RUNS),
    ],
)
def test_output_equals_plain_generate(
    architecture: str, drafter: str, rows_max: int, draft_len: int | None
) -> None:
    answered = greedy_answers(architecture)
    replica = replica_for(architecture, oracle(drafter, answered))
    outputs = check_answers(replica, answered, rows_max, draft_len, rows_max + (draft_len or 0))
    assert {output.reason for output in outputs} == {FinishReason.LENGTH}
    drafted = sum(output.usage.draft_tokens for output in outputs)
    accepted = sum(output.usage.accepted_tokens for output in outputs)
    if draft_len == 0:
        assert drafted == 0
    elif draft_len is not None and drafter == "model":
        least = 0.3 if architecture == DEMO else 0.0
        assert least < accepted / drafted < 1, "the pair must see acceptance and rejection"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_draft_of_another_architecture_changes_nothing(architecture: str) -> None:
    other = ARCHITECTURES[ARCHITECTURES.index(architecture) - 1]
    replica = tiny_replica(architecture, draft_architecture=other)
    check_answers(replica, greedy_answers(architecture), 8, 3)


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
