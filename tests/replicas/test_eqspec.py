"""Proves the rule of one step on hand-written rows: who is accepted, what is committed, from whom.

The models are scripts: what the target or the draft says at a position is written down, and every
forward pass is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from replicas.eqspec import Group, step
from replicas.paged_cache import BlockAllocator
from replicas.sampling import SamplingBatch
from replicas.stopwatch import Stopwatch
from replicas.windows import CacheShape, Window
from scheduler.messages import SamplingParams

CPU = torch.device("cpu")
VOCAB = 50
SHAPE = CacheShape(block_size=4, context_len=64, dtype=torch.float32)


@dataclass
class ScriptedModel:
    """Says script[row][p] for the token of position p, whatever it was fed."""

    script: list[dict[int, int]]
    vocab: int = VOCAB
    fed: list[list[list[int]]] = field(default_factory=list)
    positions: list[list[list[int]]] = field(default_factory=list)

    def forward(
        self, tokens: torch.Tensor, window: Window, logits_to_keep: int = 0
    ) -> torch.Tensor:
        assert tokens.shape == window.positions.shape
        self.fed.append(tokens.tolist())
        self.positions.append(window.positions.tolist())
        logits = torch.zeros(*tokens.shape, VOCAB)
        for row, says in enumerate(self.script):
            for column, position in enumerate(window.positions[row].tolist()):
                logits[row, column, says.get(position + 1, 0)] = 1.0
        return logits[:, -logits_to_keep:] if logits_to_keep else logits


def says(start: int, tokens: list[int]) -> dict[int, int]:
    return dict(enumerate(tokens, start=start))


def run(
    contents: list[list[int]],
    target: ScriptedModel,
    draft: ScriptedModel | None,
    draft_lens: list[int],
) -> tuple[list[list[int]], list[int]]:
    allocator = BlockAllocator(blocks=64, block_size=4)
    ids = [str(i) for i in range(len(contents))]
    for name, content in zip(ids, contents, strict=True):
        allocator.grow(name, len(content) + max(draft_lens) + 1)
    group = Group(
        contents,
        draft_lens,
        SamplingBatch.of([SamplingParams()] * len(contents), CPU),
        allocator.table(ids, CPU),
    )
    outcome = step(target, draft, group, SHAPE, Stopwatch(CPU))  # type: ignore[arg-type]
    assert outcome.checked == draft_lens
    return outcome.committed, outcome.accepted


@pytest.mark.parametrize(
    ("proposed", "right", "committed"),
    [
        ([11, 12, 13], [11, 12, 13, 14], [11, 12, 13, 14]),  # all, and the bonus token
        ([11, 12, 19], [11, 12, 13, 14], [11, 12, 13]),
        ([11, 19, 13], [11, 12, 13, 14], [11, 12]),  # right again after a mistake: too late
        ([19, 12, 13], [11, 12, 13, 14], [11]),
        ([19, 19, 19], [11, 12, 13, 14], [11]),
    ],
)
def test_a_row_commits_what_is_right_plus_one_token(
    proposed: list[int], right: list[int], committed: list[int]
) -> None:
    """Traps 3 and 7: k + 1 tokens when all are accepted; the bonus token is the target's."""
    content = [1, 2, 3, 4, 5]
    tokens, accepted = run(
        [content],
        ScriptedModel([says(5, right)]),
        ScriptedModel([says(5, [*proposed, 49])]),
        [3],
    )
    assert tokens == [committed]
    assert accepted == [len(committed) - 1]


def test_rows_of_one_group_commit_different_numbers() -> None:
    contents = [[1] * 9, [2] * 3, [3] * 14, [4]]
    right = [[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, 41, 42]]
    proposed = [[10, 11], [20, 29], [39, 31], [40, 41]]
    target = ScriptedModel([says(len(c), r) for c, r in zip(contents, right, strict=True)])
    draft = ScriptedModel([says(len(c), p) for c, p in zip(contents, proposed, strict=True)])
    tokens, accepted = run(contents, target, draft, [2, 2, 2, 2])
    assert tokens == [[10, 11, 12], [20, 21], [30], [40, 41, 42]]
    assert accepted == [2, 1, 0, 2]


def test_a_row_never_commits_beyond_its_own_draft_length() -> None:
    contents = [[1] * 5, [2] * 5, [3] * 5]
    both = [says(5, [11, 12, 13, 14])] * 3
    tokens, accepted = run(contents, ScriptedModel(both), ScriptedModel(both), [3, 1, 0])
    assert tokens == [[11, 12, 13, 14], [11, 12], [11]]
    assert accepted == [3, 1, 0]


def test_draft_length_zero_is_plain_decoding_without_the_draft() -> None:
    target = ScriptedModel([says(3, [7]), says(5, [8])])
    tokens, accepted = run([[1, 2, 3], [1, 2, 3, 4, 5]], target, None, [0, 0])
    assert tokens == [[7], [8]]
    assert accepted == [0, 0]
    assert target.fed == [[[3], [5]]]


def test_the_target_checks_all_rows_in_one_pass_at_their_own_positions() -> None:
    contents = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    target = ScriptedModel([says(3, [10]), says(6, [20])])
    draft = ScriptedModel([says(3, [31, 32]), says(6, [41, 42])])
    run(contents, target, draft, [2, 2])
    assert target.fed == [[[3, 31, 32], [9, 41, 42]]]
    assert target.positions == [[[2, 3, 4], [5, 6, 7]]]


def test_the_draft_is_fed_at_most_two_tokens_at_a_time() -> None:
    """Trap 4: a draft whose KV cache is not kept recomputes the whole prefix at every step."""
    contents = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    target = ScriptedModel([says(3, [10]), says(6, [20])])
    draft = ScriptedModel([says(3, [31, 32, 33]), says(6, [41, 42, 43])])
    run(contents, target, draft, [3, 3])
    assert draft.fed == [[[2, 3], [8, 9]], [[31], [41]], [[32], [42]]]
    assert draft.positions == [[[1, 2], [4, 5]], [[3], [6]], [[4], [7]]]


def test_a_step_reads_its_verdict_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 5: realignment must not cost a read per layer or row. On a device the verdict is joined
    and read once; that steps read nothing else there is shown in test_on_device."""
    reads = []
    for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):  # type: ignore[no-untyped-def]
            reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)

    class Silent(ScriptedModel):
        def forward(
            self, tokens: torch.Tensor, window: Window, logits_to_keep: int = 0
        ) -> torch.Tensor:
            logits = torch.zeros(*tokens.shape, VOCAB)
            return logits[:, -logits_to_keep:] if logits_to_keep else logits

    for rows, k in ((3, 4), (1, 1), (5, 2)):
        reads.clear()
        run([[row + 1] * (5 + row) for row in range(rows)], Silent([]), Silent([]), [k] * rows)
        assert reads == ["tolist"] * 3
