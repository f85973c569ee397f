"""Proves that passes of a few fixed shapes commit the same tokens, and that nothing is recorded
within a request.

Recording needs a GPU; on a CPU the same passes run padded through the same standing tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from replicas.cuda import GraphedModel, Kind, graphs
from replicas.models.paged_model import Output
from tests.oracle.worlds import check_answers, greedy_answers, sampled_answers
from tests.tiny_pairs import ARCHITECTURES, tiny_replica


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("draft_len", [0, 3])
def test_output_is_that_of_passes_of_exact_shapes(architecture: str, draft_len: int) -> None:
    replica = tiny_replica(architecture, graphs="on", plan_rows=5, plan_draft_len=4)
    for answered in (greedy_answers(architecture), sampled_answers(architecture)):
        check_answers(replica, answered, 5, draft_len)


def test_there_are_few_kinds_and_none_is_made_within_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = tiny_replica("llama", graphs="on", plan_rows=16, plan_draft_len=8)
    target = replica.target
    assert isinstance(target, GraphedModel)
    kinds = list(target.passes)
    assert len(kinds) == 5 * 5 * 3, "rows 1 to 16, widths 1, 2, 3, 5, 9, three reaches"
    used = set()

    def noted(kind: Kind, run: Callable[..., Output], *args: object) -> Output:
        used.add(kind)
        return run(*args)

    for kind, recorded in target.passes.items():
        monkeypatch.setattr(recorded, "run", partial(noted, kind, recorded.run))
    monkeypatch.setattr(graphs, "FixedPass", None)
    check_answers(replica, greedy_answers("llama"), 5, 3)
    assert len(used) > 3
    assert list(target.passes) == kinds


def test_a_pass_outside_of_all_kinds_runs_as_it_is() -> None:
    """Some are: those of few rows with short drafts."""
    replica = tiny_replica("llama", graphs="on", plan_rows=2, plan_draft_len=1)
    check_answers(replica, greedy_answers("llama"), 5, 3)
