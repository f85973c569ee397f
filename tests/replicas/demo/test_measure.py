"""Proves that the figure of the model card is counted as a serving step counts: by hand."""

import torch

from replicas.demo.measure import committed_per_step


def rows(*texts: str) -> torch.Tensor:
    """`y` where the draft guesses the target's token, `n` where not."""
    return torch.tensor([[mark == "y" for mark in text] for text in texts])


def test_a_draft_that_is_always_right_commits_k_plus_1() -> None:
    assert committed_per_step(rows("yyyyyyyyyy"), k=4) == (5.0, [1.0] * 4)


def test_a_draft_that_is_never_right_commits_the_target_s_token() -> None:
    committed, accepted = committed_per_step(rows("nnnnnnnn"), k=4)
    assert (committed, accepted) == (1.0, [0.0] * 4)


def test_a_right_guess_after_a_wrong_one_does_not_count() -> None:
    # Steps: y n | y y n | n | then fewer than k + 1 tokens are left.
    committed, accepted = committed_per_step(rows("ynyynnyyyy"), k=4)
    assert committed == (2 + 3 + 1) / 3
    assert accepted == [2 / 3, 1 / 2, 0.0, 0.0]


def test_every_row_walks_its_own_steps() -> None:
    committed, _ = committed_per_step(rows("yyyyyyy", "nnnnnnn"), k=4)
    assert committed == (5 + 1 + 1 + 1) / 4
