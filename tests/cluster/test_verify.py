"""Proves: outputs are compared token for token, a missing end is a difference, a replica for the
judgement is loaded for a difference only, and a difference is a tie where float32 cannot tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cluster.verify import Difference, VerifyReport, differences
from replicas.config import ReplicaConfig
from scheduler.messages import Request

CONFIG = ReplicaConfig(target="tiny")


@pytest.mark.parametrize(
    ("expected", "got", "found"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 4, 3], (1, 2, 4)),
        ([1, 2, 3], [1, 2], (2, 3, None)),
        ([1, 2], [1, 2, 3], (2, None, 3)),
    ],
)
def test_the_first_place_where_outputs_part(
    expected: list[int], got: list[int], found: tuple[int, int | None, int | None] | None
) -> None:
    same = [7, 8]
    requests = [Request(str(n), (1, 2), 3) for n in range(2)]
    own = None if found else pytest.fail  # equal outputs need no replica
    parted = differences([same, expected], [same, got], requests, CONFIG, own)
    assert parted == ([] if found is None else [Difference(1, *found)])


class Rounding(nn.Module):
    """Its logits are these numbers; in float32 they come out as multiples of 8."""

    device = torch.device("cpu")

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(logits), requires_grad=False)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        assert input_ids.tolist() == [[1, 2, 9]], "the content before the two tokens"
        return SimpleNamespace(logits=((self.weight + 1e8) - 1e8).expand(1, 3, -1))


@pytest.mark.parametrize(
    ("expected", "got", "ours", "gap", "error"),
    [
        (0, 1, [6.0, 7.0, 0.0], "+1.0", "1.0"),
        (1, 0, [7.0, 6.0, 0.5], "-1.0", "0.0"),
        (0, 2, [6.0, 5.0, 9.0], "+6.5", "8.5"),
        (0, 2, [6.0, 5.0, 1.0], "+6.5", "1.0"),
    ],
)
def test_a_difference_is_a_tie_below_the_errors_of_both_ways(
    expected: int,
    got: int,
    ours: list[float],
    gap: str,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers' float32 makes 8, 8, 0 of 7, 6, 0.5: an error of 2."""
    replica = SimpleNamespace(logits=lambda content: torch.tensor(ours))
    monkeypatch.setattr("cluster.verify.transformers_model", lambda *_args: Rounding(7.0, 6.0, 0.5))
    found = differences(
        [[9, expected], [9]],
        [[9, got], [9]],
        [Request("a", (1, 2), 3)] * 2,
        CONFIG,
        lambda: replica,
    )
    report = VerifyReport("generate", 2, 3, 0, 0, tuple(found))
    tie = abs(float(gap)) <= 2.0 + float(error)
    assert (report.identical, report.ties) == (1, int(tie))
    assert report.said()[1:] == [
        "1 of 2 outputs identical",
        *["1 part at a tie below the noise of float32"] * tie,
        f"  prompt 0: first difference at new token 1: expected {expected}, got {got}",
        f"    in float64 the expected logit is {gap}e+00 above the other and token 0 is chosen; the"
        f" error of transformers' float32 is 2.0e+00, of Lockstep's {error}e+00:"
        f" {'a tie' if tie else 'no tie'}",
    ]
