"""Proves that a costly grammar holds up its own row alone: while it is compiled or its masks are
made the row takes no part in steps, the others commit what they would, and it goes on afterwards
with the tokens that it would have had.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ALL_COMPLETED, Future, wait
from dataclasses import replace

import pytest

from cluster.local.engine import LocalEngine, Output
from replicas.decoding import DecodingRows, RowState
from replicas.grammars import GrammarError, Grammars, GrammarState, grammar_of, state, threads
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.messages import FinishReason, Request, TokenLogprobs
from tests.oracle.drafters import replica_of
from tests.oracle.test_decoding import EOS, tokenizer
from tests.oracle.worlds import mixed_requests
from tests.tiny_pairs import VOCAB

COSTLY = grammar_of("regex", ["[ -~]{9}x*"])
QUICK = grammar_of("regex", ["[0-9]{5}[a-z]*"])


class Held(Grammars):
    """Compiles the costly grammar once it may."""

    def __init__(self) -> None:
        super().__init__(tokenizer(), [EOS], VOCAB)
        self.may = threading.Event()

    def match(self, grammar: str, tokens: Sequence[int], drafts: bool = False) -> GrammarState:
        if grammar == COSTLY:
            assert self.may.wait(60)
        return super().match(grammar, tokens, drafts)


def requests() -> list[Request]:
    """A costly one, which also hangs on what it has committed, and a quick and a plain one that
    end earlier."""
    told = {"presence_penalty": 2.0, "logprobs": 1}
    costly, quick, plain = mixed_requests(VOCAB, 3, seed=3, new=(16,))
    return [
        replace(costly, decoding=Decoding(len(costly.prompt), grammar=COSTLY, **told)),
        replace(quick, decoding=Decoding(len(quick.prompt), grammar=QUICK, logprobs=1)),
        plain,
    ]


def engine(grammars: Grammars, drafter: str) -> LocalEngine:
    replica = replica_of(drafter, [], num_gpu_blocks_override=512)
    replica.grammars = grammars
    return LocalEngine(replica, SchedulerConfig(rows_max=8, draft_len=3), check=True)


Said = tuple[list[int], list[TokenLogprobs]]


def said(outputs: Iterable[Output]) -> list[Said]:
    return [(output.tokens, output.logprobs) for output in outputs]


def undisturbed(drafter: str) -> list[Said]:
    return said(engine(Grammars(tokenizer(), [EOS], VOCAB), drafter).generate(requests()))


@pytest.mark.parametrize("drafter", ["model", "suffix", "eagle3"])
def test_others_end_while_a_grammar_is_compiled_and_its_row_goes_on_afterwards(
    drafter: str,
) -> None:
    expected = undisturbed(drafter)
    held = Held()
    run = engine(held, drafter)
    outputs = [run.submit(request) for request in requests()]
    while not all(output.reason for output in outputs[1:]):
        assert run.advance()
    assert outputs[0].tokens == []
    assert not run.error
    held.may.set()
    run.run()
    assert said(outputs) == expected
    assert outputs[0].reason is FinishReason.LENGTH


def test_a_step_waits_for_a_grammar_that_is_compiled_only_where_it_has_no_other_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The grammar is compiled once a step waits for it."""
    held = Held()

    def wait_for(
        work: Iterable[Future[object]], _bound_s: float, until: str = ALL_COMPLETED
    ) -> None:
        if work := list(work):
            held.may.set()
        wait(work, 60, until)

    monkeypatch.setattr(threads, "wait", wait_for)
    row = RowState(Decoding(1, grammar=COSTLY), [1], frozenset(), held, drafts=True)
    try:
        assert DecodingRows([row, None]).redraft([[], []], [0, 0]) == ([[], []], {0})
        assert not held.may.is_set()
        alone = DecodingRows([row])
        assert alone.redraft([[]], [0]) == ([[]], {0})
        assert held.may.is_set()
        assert alone.redraft([[]], [0]) == ([[]], set())
    finally:
        held.may.set()


def test_a_row_whose_masks_are_slow_takes_part_once_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = undisturbed("model")
    run = engine(Grammars(tokenizer(), [EOS], VOCAB), "model")
    may = threading.Event()
    masks_of = state._mask_of

    def held(matcher: object) -> state.Mask:
        if matcher in slow:
            assert may.wait(60)
        return masks_of(matcher)  # type: ignore[arg-type]

    slow: list[object] = []
    made = Grammars.match

    def match(self: Grammars, grammar: str, *rest: object) -> GrammarState:
        found = made(self, grammar, *rest)  # type: ignore[arg-type]
        if grammar == COSTLY:
            slow.append(found._matcher)
        return found

    monkeypatch.setattr(state, "_mask_of", held)
    monkeypatch.setattr(Grammars, "match", match)
    outputs = [run.submit(request) for request in requests()]
    while not all(output.reason for output in outputs[1:]):
        assert run.advance()
    assert outputs[0].tokens == []
    may.set()
    run.run()
    assert said(outputs) == expected


def test_a_row_whose_masks_take_longer_than_any_may_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "MASK_S_MAX", 0.0)
    outputs = engine(Grammars(tokenizer(), [EOS], VOCAB), "model").generate(requests())
    assert [output.reason for output in outputs] == [
        FinishReason.FAILED,
        FinishReason.FAILED,
        FinishReason.LENGTH,
    ]
    assert "it takes over 0 s" in outputs[0].message


def test_a_grammar_that_cannot_be_compiled_fails_its_row_alone() -> None:
    bad, *others = requests()
    assert bad.decoding is not None
    bad = replace(bad, decoding=replace(bad.decoding, grammar="start: ("))
    with pytest.raises(GrammarError):
        Grammars(tokenizer(), [EOS], VOCAB).check("start: (")
    run = engine(Grammars(tokenizer(), [EOS], VOCAB), "model")
    outputs = run.generate([bad, *others])
    assert outputs[0].reason is FinishReason.FAILED
    assert said(outputs[1:]) == undisturbed("model")[1:]
    assert isinstance(run._runner, Replica)


@pytest.mark.parametrize("penalty", [1e39, 1e-39])
def test_no_penalty_strikes_out_the_tokens_that_a_structure_needs(penalty: float) -> None:
    """Also where all of them stand in the text already: they are made unlikely, all alike."""
    request = requests()[0]
    prompt = tuple(range(VOCAB - 1))
    decoding = Decoding(len(prompt), repetition_penalty=penalty, grammar=COSTLY)
    request = replace(request, prompt=prompt, decoding=decoding)
    (output,) = engine(Grammars(tokenizer(), [EOS], VOCAB), "model").generate([request])
    assert output.reason is FinishReason.LENGTH
    assert len(output.tokens) == request.max_new_tokens
