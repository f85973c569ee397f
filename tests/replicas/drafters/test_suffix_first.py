"""Proves that each row's draft is the suffix's or the other's, by what is likely right, and that
the other is told of its own drafts alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.drafters import DraftRequest, Observation, Proposal
from replicas.drafters.suffix_first import SuffixFirstDrafter
from replicas.sampling.choice import SamplingBatch
from replicas.stopwatch import Stopwatch
from scheduler.messages import Sampling

CPU = torch.device("cpu")
TABLE = torch.zeros((2, 1), dtype=torch.int64)
COPY = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
OPEN = [1, 2, 3]


class Sevens:
    """Drafts sevens, and remembers what it was told."""

    name, aux_layers = "sevens", (1,)

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.drafted: list[list[int] | None] = []

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None: ...

    def end(self, row: str) -> None: ...

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None: ...

    def valid(self, row: str) -> int | None:
        return 3

    def observe(self, observed: Observation) -> None:
        self.drafted.append(None if observed.drafted is None else list(observed.drafted))

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        self.asked.append(list(request.draft_lens))
        return Proposal(torch.full((request.k, len(request.ids)), 7), request.draft_lens)


class Two:
    """A row that copies and one that does not."""

    def __init__(self) -> None:
        self.other = Sevens()
        self.drafter = SuffixFirstDrafter(self.other)
        self.contents = {"copy": list(COPY), "open": list(OPEN)}
        for row, content in self.contents.items():
            self.drafter.begin(row, content, "", 0)

    def drafts(self, k: int, rows: Sequence[str] = ()) -> list[list[int]]:
        rows = rows or list(self.contents)
        sampling = SamplingBatch.of([Sampling()] * len(rows), CPU)
        contents = [self.contents[row] for row in rows]
        asked = DraftRequest(rows, contents, [k] * len(rows), sampling, TABLE)
        proposal = self.drafter.propose(asked, Stopwatch(CPU))
        columns = proposal.tokens.t().tolist()
        return [column[:length] for column, length in zip(columns, proposal.lens, strict=True)]

    def commit(self, drafted: list[int], *committed: list[int]) -> None:
        rows = list(self.contents)
        contents = list(self.contents.values())
        ranges = [(0, 0)] * len(rows)
        self.drafter.observe(Observation(rows, contents, ranges, TABLE, committed, drafted))


def test_a_row_that_copies_drafts_its_copy_and_another_what_the_other_guesses() -> None:
    two = Two()
    assert two.drafts(2) == [[5, 6], [7, 7]]
    assert two.other.asked == [[0, 2]], "the other drafts for its row alone"
    two.commit([2, 2], [5, 6, 1], [7, 8])
    assert two.other.drafted == [[0, 2]]
    assert two.drafts(4, ["copy"]) == [[2, 3, 4, 5]]
    assert len(two.other.asked) == 1, "where all rows copy the other does not run"


def test_drafts_of_both_lengths_stand_beside_each_other() -> None:
    two = Two()
    assert two.drafts(5) == [[5, 6, 1, 2, 3], [7] * 5]
    two.drafter.begin("open", [9, 9, 9], "", 0)
    two.contents["open"] = [9, 9, 9]
    assert two.drafts(5)[1][:2] == [9, 9]


def test_the_one_that_was_right_more_often_of_late_drafts() -> None:
    two = Two()
    two.contents = {"half": [1, 2, 8, 1, 2, 9, 1, 2], "open": list(OPEN)}
    two.drafter.begin("half", two.contents["half"], "", 0)
    assert two.drafts(1) == [[7], [7]], "half sure is less than the first guess"
    for _ in range(100):
        two.drafts(1)
        two.commit([1, 1], [3], [4])
        two.drafter.rollback(list(two.contents), [8, 3])
    assert two.drafts(1) == [[9], [7]], "and more than one that is always wrong"
    for _ in range(100):
        two.drafts(1, ["open"])
        two.commit([0, 1], [], [7, 7])
        two.drafter.rollback(list(two.contents), [8, 3])
    assert two.drafts(1) == [[7], [7]]


def test_after_a_failed_batch_and_a_plain_step_nothing_is_taken_for_the_others_draft() -> None:
    two = Two()
    two.drafts(2)
    two.drafter.rollback(["copy", "open"], [len(COPY), len(OPEN)])
    two.commit([0, 0], [5], [4])
    assert two.other.drafted == [[0, 0]]
    two.drafts(2)
    two.drafter.observe(Observation(["open"], [OPEN], [(0, 2)], TABLE))
    assert two.other.drafted[-1] is None, "a prefill is passed on as it is"
