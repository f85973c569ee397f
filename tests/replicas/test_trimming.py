"""Proves which draft tokens are checked: those believed in most, whole beginnings of rows, and the
same ones whether the host or the device works it out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replicas import trimming
from replicas.trimming import Trimmed, trimmed

Way = Callable[[torch.Tensor, torch.Tensor, int], Trimmed]
WAYS = pytest.mark.parametrize("way", [trimming._on_host, trimming._on_device])


def columns(chosen: Trimmed, k: int) -> list[list[int]]:
    """Which draft tokens of each row are checked, 0 being the first."""
    rows = chosen.seen.shape[0]
    drafted = list(zip(chosen.of_row.tolist(), chosen.cells.tolist(), strict=True))[rows:]
    assert chosen.of_row[:rows].tolist() == list(range(rows))
    assert chosen.cells[:rows].tolist() == [row * (k + 1) for row in range(rows)]
    found: list[list[int]] = [[] for _ in range(rows)]
    for row, cell in drafted:
        assert cell // (k + 1) == row
        found[row].append(cell % (k + 1) - 1)
    assert [len(one) for one in found] == chosen.seen[:, 0].tolist()
    return [sorted(one) for one in found]


@WAYS
@pytest.mark.parametrize(
    ("count", "kept"),
    [
        (0, [0, 0, 0]),
        (1, [1, 0, 0]),
        (2, [1, 0, 1]),
        (3, [2, 0, 1]),
        (5, [3, 1, 1]),
        (6, [3, 2, 1]),
    ],
)
def test_the_most_believed_are_whole_beginnings(way: Way, count: int, kept: list[int]) -> None:
    """Row 2 may draft one token only; what row 0 believes at its end is no more than before."""
    belief = torch.tensor([[-0.1, -0.5, -0.5], [-2.0, -2.1, -3.0], [-0.4, -0.4, -0.4]])
    chosen = way(belief, torch.tensor([[3], [3], [1]]), count)
    assert columns(chosen, 3) == [list(range(n)) for n in kept]


@WAYS
def test_a_draft_that_is_no_number_any_more_is_not_believed(way: Way) -> None:
    belief = torch.tensor([[-0.1, torch.nan, torch.nan], [-0.2, -0.3, -0.4]])
    for count in range(1, 7):
        first, second = columns(way(belief, torch.tensor([[3], [3]]), count), 3)
        assert first == list(range(len(first)))
        assert second == list(range(len(second)))
        if count <= 4:
            assert len(first) == 1


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 6))
def test_none_is_checked_without_those_before_it(seed: int, rows: int, k: int) -> None:
    """Ties, certainties and rounding included; on the host as on a device."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-2, 1, (rows, k), generator=generator) * 0.1
    belief = steps.cumsum(1) + 1e-6 * torch.rand((rows, k), generator=generator)
    draft_lens = torch.randint(0, k + 1, (rows, 1), generator=generator)
    for count in range(rows * k + 1):
        ours, theirs = (
            way(belief, draft_lens, count) for way in (trimming._on_host, trimming._on_device)
        )
        for one, other in zip(
            (ours.of_row, ours.cells, ours.seen),
            (theirs.of_row, theirs.cells, theirs.seen),
            strict=True,
        ):
            assert torch.equal(one, other)
            assert one.dtype == torch.int64
        for found in columns(ours, k):
            assert found == list(range(len(found)))


def test_the_callers_numbers_are_left_alone() -> None:
    belief = torch.tensor([[-0.1, torch.nan], [-0.2, -0.1]])
    before = belief.clone()
    trimmed(belief, torch.tensor([[2], [1]]), 2)
    assert torch.equal(belief.nan_to_num(), before.nan_to_num())
