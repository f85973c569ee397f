"""Proves that suffix decoding drafts what followed the same tokens before, of the row itself and of
outputs of the same salt alone, and that what it remembers is bounded and can be taken back."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest
import torch

from replicas.drafters import DraftRequest, Observation, suffix as module
from replicas.drafters.history import DEEP, DEPTH, END, LEAST_PROBABILITY, PLACES, Draft, History
from replicas.drafters.suffix import OUTPUTS_TOKENS, SuffixDrafter, SuffixSource
from replicas.sampling.choice import SamplingBatch
from replicas.stopwatch import Stopwatch
from scheduler.messages import Sampling
from tests.replicas.pool import Client, failing_pass, prompt
from tests.tiny_pairs import tiny_replica

CPU = torch.device("cpu")
TABLE = torch.zeros((1, 1), dtype=torch.int64)


def drafts_of(drafter: SuffixDrafter, *rows: str, k: int | list[int] = 4) -> list[list[int]]:
    contents = [list(drafter.rows[row].history.tokens) for row in rows]
    draft_lens = [k] * len(rows) if isinstance(k, int) else k
    sampling = SamplingBatch.of([Sampling()] * len(rows), CPU)
    proposal = drafter.propose(
        DraftRequest(rows, contents, draft_lens, sampling, TABLE), Stopwatch(CPU)
    )
    assert proposal.tokens.shape == (max(proposal.lens), len(rows))
    columns = proposal.tokens.t().tolist()
    return [column[:length] for column, length in zip(columns, proposal.lens, strict=True)]


def commit(drafter: SuffixDrafter, row: str, tokens: list[int]) -> None:
    drafter.observe(Observation([row], [[]], [(0, 0)], TABLE, [tokens]))


def said(drafter: SuffixDrafter, tokens: list[int], salt: str = "") -> None:
    """A row puts this out and leaves."""
    drafter.begin("said", [0], salt, 0)
    commit(drafter, "said", tokens)
    drafter.end("said")


def test_a_row_drafts_what_followed_its_last_tokens_before_and_its_own_length() -> None:
    drafter = SuffixDrafter()
    drafter.begin("a", [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4], "", 0)
    drafter.begin("b", [1, 2, 9, 9, 1, 2], "", 0)
    drafter.begin("c", [1, 2, 3, 4, 5], "", 0)
    drafter.begin("d", [1], "", 0)
    drafts = drafts_of(drafter, "a", "b", "c", "d", k=8)
    assert drafts == [[5, 6, 7, 8, 1], [9, 9, 1], [], []], "a match of m tokens, m + 1 of draft"
    assert drafts_of(drafter, "a", "b", k=[2, 0]) == [[5, 6], []]
    assert drafts_of(drafter, "c", "d") == [[], []]


def by_definition(text: list[int], most: int, tail: list[int] | None) -> Draft:
    """The draft that History's docstrings define, by looking at every place of a short text."""
    ahead = [] if tail is None else [END]
    ends = range(len(text) - (tail is None), 1, -1)
    tail = tail or text[-DEPTH:]
    found: list[tuple[int, int]] = []
    for end in ends:
        reach = min(end, len(tail))
        same = [text[end - back] == tail[-back] for back in range(1, reach + 1)]
        length = [*same, False].index(False)
        if length >= 2:
            found.append((length, end))
        if len(found) == PLACES or [start for start, _ in found].count(len(tail)) == DEEP:
            break
    found.sort(key=lambda pair: (-pair[0], -pair[1]))
    best: Draft = (0.0, [])
    for least in dict.fromkeys(length for length, _ in found):
        places = [end for length, end in found if length >= least]
        score, probability, draft = 0.0, 1.0, list[int]()
        while len(draft) < min(most, least + 1):
            whole = [*text, *(ahead or draft)]
            votes = Counter(whole[end + len(draft)] for end in places)
            token, count = votes.most_common(1)[0]
            probability *= count / len(places)
            if token == END or probability < LEAST_PROBABILITY:
                break
            places = [end for end in places if whole[end + len(draft)] == token]
            score += probability
            draft.append(token)
        if score > best[0]:
            best = score, draft
    return best


def test_a_draft_is_the_one_that_its_definition_gives() -> None:
    """Of a text for itself, and of several for the end of another."""
    rng = random.Random(2)
    for _ in range(4000):
        tokens = range(rng.randint(1, 4))
        text = rng.choices(tokens, k=rng.randint(2, 48))
        tail = None
        if rng.random() < 0.5:
            tail = rng.choices(tokens, k=rng.randint(2, 8))
            text = rng.choices([*text, END], k=len(text))
        most = rng.randint(1, 8)
        draft = History(text).draft(most, tail)
        assert draft == by_definition(text, most, tail), (text, most, tail)


def test_outputs_are_drafted_from_after_their_row_has_left_and_never_across_two() -> None:
    drafter = SuffixDrafter()
    drafter.begin("a", [9, 1, 2], "", 0)
    assert drafts_of(drafter, "a") == [[]]
    said(drafter, [1, 2, 3, 4])
    said(drafter, [7, 7])
    assert drafts_of(drafter, "a", k=8) == [[3, 4]]
    commit(drafter, "a", [5, 7, 7])
    assert drafts_of(drafter, "a") == [[]]


def test_prompts_are_no_outputs_and_a_row_that_comes_back_puts_out_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "OUTPUTS_LEAST", 0)
    drafter = SuffixDrafter()
    drafter.begin("a", [1, 2, 3, 4], "", 0)
    drafter.end("a")
    assert drafter.size == 0
    for content, token in (([1, 2], 3), ([1, 2, 3], 4)):  # sent back in between
        drafter.begin("a", content, "", 0)
        commit(drafter, "a", [token])
        drafter.end("a")
    assert drafter.size == len([3, END, 4, END])


def test_nothing_shows_between_salts() -> None:
    drafter = SuffixDrafter()
    said(drafter, [1, 2, 3, 4, 5], salt="x")
    for salt, draft in (("x", [3, 4, 5]), ("y", []), ("", [])):
        drafter.begin(salt, [1, 2], salt, 0)
        assert drafts_of(drafter, salt) == [draft]


@pytest.mark.parametrize(("salts", "length"), [(1, 256), (20_000, 1)])
def test_what_is_remembered_is_small_and_what_is_older_gives_way(salts: int, length: int) -> None:
    rng = random.Random(0)
    drafter = SuffixDrafter()
    tracemalloc.start()
    for number in range(max(salts, 1100)):
        said(drafter, [rng.randrange(50_000) for _ in range(length)], salt=f"{number % salts}")
        assert drafter.size <= OUTPUTS_TOKENS
    assert tracemalloc.get_traced_memory()[0] < SuffixSource.memory.kept
    tracemalloc.stop()
    said(drafter, [1, 2, 3, 4], salt="last")
    drafter.begin("a", [1, 2], "last", 0)
    assert drafts_of(drafter, "a") == [[3, 4]]
    said(drafter, [8] * OUTPUTS_TOKENS, salt="last")
    assert drafts_of(drafter, "a") == [[]]
    assert drafter.size == OUTPUTS_TOKENS // 2, "the younger half"


def test_a_history_that_was_cut_back_is_as_it_was() -> None:
    rng = random.Random(1)
    for _ in range(30):
        kept = [rng.randrange(5) for _ in range(rng.randrange(0, 900))]
        cut = History(kept)
        for _ in range(rng.randrange(1, 4)):
            cut.extend([rng.randrange(5) for _ in range(rng.randrange(900))])
        cut.truncate(len(kept))
        assert cut.draft(8) == History(kept).draft(8)
        cut.extend([1, 2, 1])
        assert cut.draft(8) == History([*kept, 1, 2, 1]).draft(8)


def test_a_replica_tells_it_all_that_is_committed_and_takes_back_what_failed() -> None:
    drafter = SuffixDrafter()
    replica = tiny_replica("llama", drafter=drafter)
    client = Client(replica)

    def known() -> dict[str, list[int]]:
        return {name: list(row.history.tokens) for name, row in drafter.rows.items()}

    client.prefill(new=40, a=prompt(9), b=prompt(30))
    for k, n in ((0, 3), (4, 2), (0, 1), (3, 3)):
        client.steps(k, n)
        assert known() == client.contents
    with pytest.raises(RuntimeError), failing_pass(replica, 3):
        client.steps(4, 5)
    assert known() == client.contents
