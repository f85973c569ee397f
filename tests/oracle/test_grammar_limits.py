"""The oracle for grammars that stop: a row ends at the same token, with the same reason, whatever
drafts, however far, and whatever runs beside it.

llguidance counts items, states and work, and copies of a matcher share some of the counts. Each
grammar here reaches one of the limits, which are small, in the middle of a text. What else a draft
token touches before the target has confirmed it is safe because
- counts of penalties and tokens that may not follow are worked out anew from the draft in each
  step (`RowState.adjust`), and take in committed tokens only;
- log-probabilities are those of the logits before any change, of committed tokens only;
- stop strings and texts see committed tokens only (`cluster.frontend`);
- a drafter's own state is its matter: it changes drafts and no choice.
- deadlines and timers are the pool's, which knows of committed tokens only; the bound on a mask's
  time counts for the row's own masks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from llguidance import LLParserLimits

from cluster.local.engine import LocalEngine
from replicas.grammars import Grammars, grammar_of
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.messages import FinishReason, Request
from tests.oracle.drafters import ORACLES, replica_of
from tests.oracle.test_decoding import EOS, tokenizer
from tests.oracle.test_drafters import DRAFTERS
from tests.oracle.worlds import mixed_requests, run_staggered, sampled
from tests.tiny_pairs import DEVICE, VOCAB

LIMITS = LLParserLimits(
    max_items_in_row=60, step_lexer_fuel=200, max_lexer_states=40, verbose_errors=False
)
FORTY = ", ".join(f'"k{number}": {{"type": "integer"}}' for number in range(40))
STOPPING = {
    "too many items behind an opening brace": (
        "json_schema",
        f'{{"anyOf": [{{"type": "null"}}, {{"type": "object", "properties": {{{FORTY}}}}}]}}',
    ),
    # The tokenizer has no é: no text ends.
    "too ambiguous": ("grammar", 'start: e "é"\ne: e e e | e e | "a" | "b"'),
    "too many states": ("regex", "([a-z]{60}|[A-Z]{60}|[0-9]{60})é"),
    "too much work": ("regex", "(a|b|c|d)*[a-d](a|b|c|d){40}é"),
    "no token is left": ("regex", "[a-z]{3}é"),
}
"""Why it stops: a structure."""
NEW = 40
End = tuple[list[int], FinishReason | None, str]


@cache
def requests() -> tuple[Request, ...]:
    plain = mixed_requests(VOCAB, 2 * len(STOPPING), seed=5, new=(NEW,))
    made = []
    for number, request in enumerate([*plain[: len(STOPPING)], *sampled(plain)[len(STOPPING) :]]):
        kind, text = list(STOPPING.values())[number % len(STOPPING)]
        decoding = Decoding(len(request.prompt), grammar=grammar_of(kind, [text]))
        made.append(replace(request, decoding=decoding, stop_token_ids=(EOS,)))
    return tuple(made)


def limited(drafter: str, known: tuple[End, ...] = ()) -> Replica:
    """`known`: what an oracle knows of the requests; beyond their ends it drafts, too."""
    beyond = [5, 9, 40, 33, 60, 61, 62, 63]
    answered = (
        [
            (request, [*tokens, *beyond])
            for request, (tokens, _, _) in zip(requests(), known, strict=True)
        ]
        if drafter in ORACLES
        else []
    )
    replica = replica_of(
        drafter, answered, num_gpu_blocks_override=2048, deterministic=DEVICE != "cpu"
    )
    replica.grammars = Grammars(tokenizer(), [EOS], VOCAB, LIMITS)
    return replica


@cache
def alone() -> tuple[End, ...]:
    """Without a drafter, one row at a time."""
    engine = LocalEngine(limited("none"), SchedulerConfig(rows_max=1, draft_len=0))
    return tuple(
        (output.tokens, output.reason, output.message) for output in engine.generate(requests())
    )


def test_the_grammars_stop_in_the_middle_of_a_text() -> None:
    ends = dict(zip(STOPPING, alone(), strict=False))
    for why, (tokens, reason, message) in list(ends.items())[1:]:
        assert reason is FinishReason.FAILED, why
        assert 1 <= len(tokens) < NEW, why
        assert message.startswith("the text cannot go on: "), why
    assert any(reason is FinishReason.STOP for _, reason, _ in alone()), "null"


@pytest.mark.long
@pytest.mark.parametrize(("rows_max", "draft_len"), [(1, 4), (8, 0), (8, 1), (8, 4), (8, 8)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_row_ends_at_the_same_token_with_any_drafter(
    drafter: str, rows_max: int, draft_len: int
) -> None:
    outputs = run_staggered(limited(drafter, alone()), requests(), rows_max, draft_len, rows_max)
    assert [(output.tokens, output.reason, output.message) for output in outputs] == list(alone())
