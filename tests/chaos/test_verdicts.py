"""Proves: the judge of a chaos run calls right only what is right, and says what is wrong.

Hand-written rows; no cluster.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import grpc
import pytest

from protos import lockstep_pb2 as pb
from replicas.config import ReplicaConfig
from tests.chaos.answers import cut, fake_bases
from tests.chaos.kills import Kind, draw_strikes
from tests.chaos.load import Ask, Outcome, Verdict
from tests.chaos.mix import Mix, draw_prompts
from tests.chaos.phases import is_clean, summary
from tests.cluster.fakes import load_fake_text

OK = grpc.StatusCode.OK
TEXT = load_fake_text(ReplicaConfig())
(BASE,) = fake_bases([[5, 6, 7]])
RIGHT = cut(BASE, TEXT, 8, ignore_eos=True)
TOKENS = list(RIGHT.tokens)
NONE: Counter[Kind] = Counter()


def outcome(**fields: object) -> Outcome:
    """A right answer, but for the fields given; `timeout_s` is the request's."""
    message = pb.GenerateRequest(max_new_tokens=8, request_id="x")
    if "timeout_s" in fields:
        message.timeout_s = float(str(fields.pop("timeout_s")))
    made = Outcome(
        Ask(message, RIGHT),
        began_s=0.0,
        ended_s=1.0,
        tokens=list(TOKENS),
        text=RIGHT.text,
        end=pb.End(finish_reason=pb.FINISH_REASON_LENGTH),
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def cut_off(count: int, **fields: object) -> Outcome:
    """Some of the right tokens, and no end."""
    nothing = {"tokens": TOKENS[:count], "text": "", "end": None}
    return outcome(**(nothing | fields))


DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED
ROWS = [
    ("the right answer", outcome(), Verdict.RIGHT),
    ("cancelled before the end", cut_off(3, cancelled=True), Verdict.CANCELLED),
    ("cancelled with nothing", cut_off(0, cancelled=True), Verdict.CANCELLED),
    ("its deadline passed", cut_off(3, code=DEADLINE, timeout_s=1.0), Verdict.DEADLINE),
    ("an end, deadline passed", outcome(code=DEADLINE, timeout_s=1.0), Verdict.DEADLINE),
    ("its text missing", outcome(code=DEADLINE, timeout_s=1.0, text=""), Verdict.WRONG),
    ("a deadline it did not set", cut_off(3, code=DEADLINE), Verdict.LOST),
    ("a deadline too late", cut_off(3, code=DEADLINE, timeout_s=1.0, ended_s=30), Verdict.LOST),
    ("a deadline too early", cut_off(3, code=DEADLINE, timeout_s=5.0), Verdict.LOST),
    ("an error", cut_off(3, code=grpc.StatusCode.INTERNAL), Verdict.LOST),
    ("refused", cut_off(0, code=grpc.StatusCode.RESOURCE_EXHAUSTED), Verdict.LOST),
    ("no end although OK", cut_off(8, text=RIGHT.text), Verdict.LOST),
    ("a token missing at the end", outcome(tokens=TOKENS[:-1]), Verdict.WRONG),
    ("a token missing in the middle", outcome(tokens=TOKENS[:3] + TOKENS[4:]), Verdict.WRONG),
    ("another token", outcome(tokens=[*TOKENS[:-1], TOKENS[-1] ^ 1]), Verdict.WRONG),
    ("another token, cancelled", cut_off(0, tokens=[0], cancelled=True), Verdict.WRONG),
    ("a token twice", outcome(tokens=TOKENS[:4] + TOKENS[3:]), Verdict.DOUBLED),
    ("two tokens twice", outcome(tokens=TOKENS[:4] + TOKENS[2:]), Verdict.DOUBLED),
    ("a token after the last one", outcome(tokens=[*TOKENS, 9]), Verdict.DOUBLED),
    ("text missing", outcome(text=RIGHT.text[:-1]), Verdict.WRONG),
    ("other text, cancelled", cut_off(3, text="\0", cancelled=True), Verdict.WRONG),
    ("another reason", outcome(end=pb.End(finish_reason=1)), Verdict.WRONG),
]


@pytest.mark.parametrize(("answer", "verdict"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS])
def test_the_verdict_of(answer: Outcome, verdict: Verdict) -> None:
    assert answer.verdict() is verdict


def test_the_seed_gives_the_requests_and_the_strikes() -> None:
    def asks(seed: int) -> list[bytes]:
        rng = Random(seed)
        mix = Mix(rng, fake_bases(draw_prompts(rng, TEXT, 8)), TEXT)
        return [mix.draw().message.SerializeToString(deterministic=True) for _ in range(50)]

    assert asks(3) == asks(3) != asks(4)
    strikes = draw_strikes(Random(3), 60.0, (3.0, 8.0), list(Kind))
    assert strikes == draw_strikes(Random(3), 60.0, (3.0, 8.0), list(Kind))
    assert {strike.kind for strike in strikes[: len(Kind)]} == set(Kind)


def test_one_bad_answer_or_one_block_left_over_makes_a_run_unclean() -> None:
    assert is_clean(summary([outcome(), cut_off(1, cancelled=True)], NONE, left=""))
    assert not is_clean(summary([outcome()], NONE, left="1 block"))
    assert not is_clean(summary([], NONE, left=""))
    for bad in (outcome(tokens=[9]), outcome(text=""), cut_off(3, code=grpc.StatusCode.INTERNAL)):
        assert not is_clean(summary([outcome(), bad], NONE, left=""))
