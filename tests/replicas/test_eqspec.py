"""Proves the rule of one step on hand-written rows: what is accepted, and what is committed.

The models are scripts: what the target or the draft says at a position is written down, and every
forward pass is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from replicas.drafters.model import ModelDrafter
from replicas.drafters.protocol import DraftRequest, Observation
from replicas.eqspec import step
from replicas.invariant.host_attention import HostBackend
from replicas.invariant.layout import PassLayout
from replicas.invariant.ops import Arithmetic
from replicas.kv_cache import BlockAllocator, CacheShape, PagedCache
from replicas.models.paged_model import ALL, ForwardOptions, Output
from replicas.sampling.choice import SamplingBatch
from replicas.stopwatch import Stopwatch
from scheduler.messages import Sampling

CPU = torch.device("cpu")
VOCAB = 70
SHAPE = CacheShape(block_size=4, context_len=64, heads=1, kv_heads=1, head_dim=4)


@dataclass
class ScriptedModel:
    """Says script[row][p] for the token of position p, whatever it was fed."""

    script: list[dict[int, int]]
    vocab: int = VOCAB
    fed: list[list[list[int]]] = field(default_factory=list)
    positions: list[list[list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = PagedCache(SHAPE, 1, 64, torch.float32, CPU)
        self.backend = HostBackend(self.cache, Arithmetic())

    def forward(
        self, tokens: torch.Tensor, layout: PassLayout, options: ForwardOptions = ALL
    ) -> Output:
        positions = layout.positions.tolist()
        assert tokens.shape == (len(positions),)
        places = [row for group in layout.groups for row in group.tokens.tolist()]
        of_rows = [slice(row[0], row[-1] + 1) for row in sorted(places)]
        self.fed.append([tokens.tolist()[row] for row in of_rows])
        self.positions.append([positions[row] for row in of_rows])
        logits = torch.zeros(len(positions), VOCAB)
        for says, item in zip(self.script, of_rows, strict=False):
            for place in range(len(positions))[item]:
                logits[place, says.get(positions[place] + 1, 0)] = 1.0
        return Output(
            logits[options.logits] if isinstance(options.logits, torch.Tensor) else logits
        )


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
    drafter = None
    if draft is not None:
        drafter = ModelDrafter(draft, "scripted", 64)  # type: ignore[arg-type]
    for name, content in zip(ids, contents, strict=True):
        allocator.grow(name, len(content) + max(draft_lens) + 1)
        if drafter is not None:
            drafter.begin(name, content, "", len(content) - 1)
    rows = DraftRequest(
        ids,
        contents,
        draft_lens,
        SamplingBatch.of([Sampling()] * len(contents), CPU),
        allocator.table(ids, CPU),
    )
    outcome = step(target, drafter, rows, None, Stopwatch(CPU))  # type: ignore[arg-type]
    return outcome.committed, outcome.accepted


def test_a_row_commits_what_is_right_of_its_own_draft_plus_one_token() -> None:
    """Traps 3 and 7: k + 1 tokens when all are accepted; the bonus token is the target's. What is
    right again after a mistake comes too late."""
    contents = [[1] * 9, [2] * 3, [3] * 14, [4], [5] * 5, [6] * 5]
    right = [[first, first + 1, first + 2] for first in range(10, 61, 10)]
    proposed = [[10, 11], [20, 29], [39, 31], [40, 41], [50, 51], [60, 61]]
    target = ScriptedModel([says(len(c), r) for c, r in zip(contents, right, strict=True)])
    draft = ScriptedModel([says(len(c), p) for c, p in zip(contents, proposed, strict=True)])
    tokens, accepted = run(contents, target, draft, [2, 2, 2, 2, 1, 0])
    assert tokens == [[10, 11, 12], [20, 21], [30], [40, 41, 42], [50, 51], [60]]
    assert accepted == [2, 1, 0, 2, 1, 0]


def test_a_draft_model_knows_where_its_cache_holds_what_was_committed() -> None:
    """Four tokens were drafted and four are right, but some are those that a grammar forces: of
    the first row none, of the second two, of the third all."""
    drafter = ModelDrafter(ScriptedModel([]), "scripted", 64)  # type: ignore[arg-type]
    contents = [[1] * 5] * 3
    for row in "abc":
        drafter.begin(row, contents[0], "", 4)
    committed = [[7, 7, 7, 7, 7]] * 3
    table = torch.zeros((3, 4), dtype=torch.int64)
    drafter.observe(Observation("abc", contents, [(4, 9)] * 3, table, committed, [4, 2, 0]))
    # The fourth one was proposed, but never fed.
    assert [drafter.valid(row) for row in "abc"] == [8, 7, 5]


def test_the_target_checks_all_rows_in_one_pass_and_the_draft_is_fed_two_tokens_at_most() -> None:
    """Trap 4: a draft whose KV cache is not kept recomputes the whole prefix at every step."""
    contents = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    target = ScriptedModel([says(3, [10]), says(6, [20])])
    draft = ScriptedModel([says(3, [31, 32, 33]), says(6, [41, 42, 43])])
    run(contents, target, draft, [3, 3])
    assert target.fed == [[[3, 31, 32, 33], [9, 41, 42, 43]]]
    assert target.positions == [[[2, 3, 4, 5], [5, 6, 7, 8]]]
    assert draft.fed == [[[2, 3], [8, 9]], [[31], [41]], [[32], [42]]]
    assert draft.positions == [[[1, 2], [4, 5]], [[3], [6]], [[4], [7]]]
