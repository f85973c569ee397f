"""Proves the rule of one step on hand-written rows: what is accepted, and what is committed.

The models are scripts: what the target or the draft says at a position is written down, and every
forward pass is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from replicas.drafters.model import ModelDrafter
from replicas.drafters.protocol import DraftRequest, Observation, Proposal
from replicas.eqspec import step
from replicas.invariant.host_attention import HostBackend
from replicas.invariant.layout import PassLayout
from replicas.invariant.ops import Arithmetic
from replicas.kv_cache import BlockAllocator, CacheShape, PagedCache
from replicas.models.paged_model import ALL, ForwardOptions, Output
from replicas.sampling.choice import SamplingBatch
from replicas.stopwatch import Stopwatch
from scheduler.messages import RowFailure, Sampling

CPU = torch.device("cpu")
VOCAB = 70
NO_NUMBER = -1
SHAPE = CacheShape(block_size=4, context_len=64, heads=1, kv_heads=1, head_dim=4)


@dataclass
class ScriptedModel:
    """Says script[row][p] for the token of position p, whatever it was fed; `NO_NUMBER`: a NaN."""

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
                said = says.get(positions[place] + 1, 0)
                logits[place, said] = torch.nan if said == NO_NUMBER else 1.0
        return Output(
            logits[options.logits] if isinstance(options.logits, torch.Tensor) else logits
        )


def says(start: int, tokens: list[int]) -> dict[int, int]:
    return dict(enumerate(tokens, start=start))


def rows_of(contents: list[list[int]], draft_lens: list[int]) -> DraftRequest:
    """All greedy."""
    allocator = BlockAllocator(blocks=64, block_size=4)
    ids = [str(i) for i in range(len(contents))]
    for name, content in zip(ids, contents, strict=True):
        allocator.grow(name, len(content) + max(draft_lens) + 1)
    sampling = SamplingBatch.of([Sampling()] * len(contents), CPU)
    return DraftRequest(ids, contents, draft_lens, sampling, allocator.table(ids, CPU))


def run(
    contents: list[list[int]],
    target: ScriptedModel,
    draft: ScriptedModel | None,
    draft_lens: list[int],
) -> tuple[list[list[int]], list[int]]:
    rows, drafter = rows_of(contents, draft_lens), None
    if draft is not None:
        drafter = ModelDrafter(draft, "scripted", 64)  # type: ignore[arg-type]
        for name, content in zip(rows.ids, contents, strict=True):
            drafter.begin(name, content, "", len(content) - 1)
    outcome = step(target, drafter, rows, None, Stopwatch(CPU))  # type: ignore[arg-type]
    return outcome.committed, outcome.accepted


@dataclass
class Clock:
    """A stopwatch that knows which sections are open."""

    open: list[str] = field(default_factory=list)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.open.append(name)
        yield
        self.open.remove(name)


@dataclass
class ScriptedDrafter:
    """Drafts what is written down, and keeps what it is told and in which sections."""

    drafts: list[list[int]]
    clock: Clock
    aux_layers: tuple[int, ...] = ()
    told: list[Observation] = field(default_factory=list)
    sections: list[list[str]] = field(default_factory=list)

    def propose(self, request: DraftRequest, watch: Clock) -> Proposal:
        return Proposal.of(self.drafts, CPU)

    def observe(self, observed: Observation) -> None:
        self.told.append(observed)
        self.sections.append([*self.clock.open])


@dataclass
class ScriptedHooks:
    """Leaves rows out of a step, and cuts what others commit."""

    absent: set[int] = field(default_factory=set)
    cut: dict[int, int] = field(default_factory=dict)
    failures: dict[int, RowFailure] = field(default_factory=dict)
    drafts: bool = True

    def redraft(self, drafts: list[list[int]], most: list[int]) -> tuple[list[list[int]], set[int]]:
        return [[] if row in self.absent else d for row, d in enumerate(drafts)], self.absent

    def adjust(self, row: int, draft: list[int], logits: torch.Tensor) -> None:
        assert len(logits) == len(draft) + 1

    def commit(self, committed: list[list[int]]) -> None:
        for row, count in self.cut.items():
            del committed[row][count:]
            self.failures[row] = RowFailure("cut")


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


@pytest.mark.parametrize(
    ("draft_lens", "widths"),
    [
        ([3, 0, 0, 0], [4, 1, 1, 1]),
        ([3, 1], [4, 2]),  # three quarters
        ([2, 2, 2, 1], [3, 3, 3, 3]),
        ([1, 1], [2, 2]),
    ],
)
def test_a_check_has_the_tokens_of_each_row_alone_where_that_saves_a_quarter(
    draft_lens: list[int], widths: list[int]
) -> None:
    contents = [[1, 2, 3]] * len(draft_lens)
    target, clock = ScriptedModel([says(3, [10, 11, 12, 13])] * len(draft_lens)), Clock()
    drafter = ScriptedDrafter([[10, 11, 12][:length] for length in draft_lens], clock)
    outcome = step(target, drafter, rows_of(contents, draft_lens), None, clock)  # type: ignore[arg-type]
    assert [len(row) for row in target.fed[0]] == widths
    assert outcome.accepted == outcome.drafted == draft_lens
    assert outcome.committed == [[10, 11, 12, 13][: length + 1] for length in draft_lens]


def test_a_step_in_which_no_row_takes_part_checks_nothing() -> None:
    target, clock = ScriptedModel([]), Clock()
    drafter = ScriptedDrafter([[10], [20]], clock)
    hooks = ScriptedHooks(absent={0, 1}, failures={1: RowFailure("stopped")})
    rows = rows_of([[1, 2], [3]], [1, 1])
    outcome = step(target, drafter, rows, hooks, clock)  # type: ignore[arg-type]
    assert target.fed == []
    assert (outcome.committed, outcome.accepted) == ([[], []], [0, 0])
    assert (outcome.drafted, outcome.absent) == ([0, 0], {0, 1})
    assert outcome.failures == {1: RowFailure("stopped")}
    assert drafter.told == []


def test_a_drafter_is_told_of_the_rows_that_go_on() -> None:
    """A row is absent, one is cut after two of its tokens, one has no number after its draft."""
    contents = [[1, 2], [3, 4, 5], [6, 7], [8]]
    target = ScriptedModel([says(len(c), [10, 11, 12]) for c in contents])
    target.script[2][4] = NO_NUMBER
    clock = Clock()
    drafter = ScriptedDrafter([[10, 11]] * 4, clock)
    hooks = ScriptedHooks(absent={0}, cut={1: 1})
    outcome = step(target, drafter, rows_of(contents, [2] * 4), hooks, clock)  # type: ignore[arg-type]
    assert outcome.committed == [[], [10], [10, 11], [10, 11, 12]]
    assert outcome.accepted == [0, 1, 2, 2]
    missing = RowFailure("the logits after 4 tokens are not finite")
    assert outcome.failures == {1: RowFailure("cut"), 2: missing}
    (told,) = drafter.told
    assert (told.ids, told.ranges, told.committed) == (["3"], [(0, 3)], [[10, 11, 12]])
    assert (told.drafted, len(told.table)) == ([2], 1)


def test_a_drafter_is_not_told_of_a_step_that_no_row_survives() -> None:
    target, clock = ScriptedModel([{2: NO_NUMBER}]), Clock()
    drafter = ScriptedDrafter([[10]], clock)
    outcome = step(target, drafter, rows_of([[1, 2]], [1]), None, clock)  # type: ignore[arg-type]
    assert list(outcome.failures) == [0]
    assert drafter.told == []


@pytest.mark.parametrize("aux_layers", [(), (1,)])
def test_what_a_drafter_does_with_hidden_states_counts_as_the_check(
    aux_layers: tuple[int, ...],
) -> None:
    target, clock = ScriptedModel([says(2, [10, 11])]), Clock()
    drafter = ScriptedDrafter([[10]], clock, aux_layers)
    step(target, drafter, rows_of([[1, 2]], [1]), None, clock)  # type: ignore[arg-type]
    assert drafter.sections == [["verify"] if aux_layers else []]
