"""The oracle over features: whatever a request asks for, whatever drafts and whatever runs beside
it, it receives what it receives alone without a drafter, to the last bit.

The table is made, not written: every drafter, greedy and sampled, every feature, batch 1 and 8.
`make test` runs cells that a seed draws, LOCKSTEP_FEATURES_SEED if it is set; `make test-slow` runs
the others. A cell is a test with a name of its own, so one that fails is run again by it.

What follows reasoning, a schema or a forced call, has a table of its own, with every drafter and
batch at draft lengths 0 and 4.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import pytest

from cluster.frontend.text import TextRules, TextStream
from cluster.local.engine import LocalEngine, Output
from replicas.grammars import Grammars, grammar_of
from scheduler.config import SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.messages import Request, Sampling
from tests.oracle.drafters import replica_of
from tests.oracle.test_decoding import CALL, EOS, IDS, SCHEMA, of_tool, thought, tokenizer
from tests.oracle.test_drafters import DRAFTERS, TIGHT
from tests.tiny_pairs import DEVICE, VOCAB

NEW = 16
DRAWN = 48
"""Cells of `make test`."""
Change = Callable[[int, Request, "Alone | None"], Request]


@dataclass(frozen=True)
class Alone:
    """What the same request without the feature receives by itself."""

    tokens: list[int]
    text: str


@dataclass(frozen=True)
class Feature:
    change: Change = lambda number, request, alone: request
    """Of a request by its number; what it received without the feature is known."""
    stops: bool = False
    """Whether two characters of what it would say end it."""
    blocks: int = 2048
    first: int = 0
    """Requests that have ended before the others come."""
    mates: int = 0
    """Others, which are aborted in the middle."""


@dataclass
class Received:
    output: Output
    stream: TextStream
    text: str = ""
    taken: int = 0
    stop: str | None = field(default=None)

    @property
    def whole(self) -> tuple[object, ...]:
        """All that a client may see."""
        seen = self.output
        if self.stop is not None:
            told = (seen.tokens[: self.taken], seen.logprobs[: self.taken], "stop", "")
        else:
            told = (seen.tokens, seen.logprobs, str(seen.reason), seen.message)
        return (*told, seen.prompt_logprobs, self.text, self.stop)


def decoding(*variants: dict[str, object]) -> Change:
    """Each request has the next of these."""

    def change(number: int, request: Request, alone: Alone | None) -> Request:
        asked = Decoding(len(request.prompt), **variants[number % len(variants)])  # type: ignore[arg-type]
        return replace(request, decoding=asked)

    return change


def banned(number: int, request: Request, alone: Alone | None) -> Request:
    """Biases, and bans of what it would say."""
    said = [] if alone is None else alone.tokens
    words = tuple(tuple(said[at : at + size]) for at, size in ((0, 1), (2, 2), (5, 3)))
    bias = ((5, 3.0), (40, -100.0), (number, 4.0), (EOS, 2.0))
    asked = Decoding(
        len(request.prompt),
        logit_bias=bias,
        bad_words=tuple(word for word in words if word),
        min_tokens=number,
    )
    return replace(request, decoding=asked)


def filtered(number: int, request: Request, alone: Alone | None) -> Request:
    low = (0.02, 0.1, 0.3)[number % 3]
    return replace(request, sampling=replace(request.sampling, min_p=low))


def alike(number: int, request: Request, alone: Alone | None) -> Request:
    prefix = tuple(random.Random(9).randrange(60, 65) for _ in range(26))
    return replace(request, prompt=prefix[: 18 + 8 * (number % 2)] + request.prompt[:3])


def long(number: int, request: Request, alone: Alone | None) -> Request:
    rng = random.Random(number)
    return replace(request, prompt=tuple(rng.randrange(60, 65) for _ in range(60)))


def thinking(*grammars: str) -> Change:
    """Each request reasons, and has the next of these and room for it."""
    # An object may have further names; so most end.
    asked = {"logit_bias": ((ord("}") - 29, 6.0), (EOS, 6.0)), "logprobs": 1}
    change = decoding(*({"grammar": grammar, **asked} for grammar in grammars))

    def changed(number: int, request: Request, alone: Alone | None) -> Request:
        return replace(change(number, request, alone), max_new_tokens=3 * NEW)

    return changed


OBJECT = grammar_of("json_schema", [json.dumps(SCHEMA)])
HERMES = of_tool("auto", "hermes")
THINKING = of_tool("required", "mistral", reasons="mistral")
BUDGETS = (1, 4, 7)
BEHIND = {
    "schema_behind_reasoning": Feature(
        thinking(*(thought("mistral", True, budget) for budget in BUDGETS))
    ),
    "call_behind_reasoning": Feature(
        thinking(
            *(of_tool("required", "mistral", reasons="mistral", budget=most) for most in BUDGETS)
        )
    ),
}
FEATURES = {
    "plain": Feature(),
    "penalties": Feature(
        decoding(
            {"repetition_penalty": 1.6},
            {"frequency_penalty": 0.8, "presence_penalty": -0.3},
            {"repetition_penalty": 0.8, "presence_penalty": 1.4},
        )
    ),
    "bias_and_bans": Feature(banned),
    "min_p": Feature(filtered),
    "json_schema": Feature(decoding({"grammar": OBJECT}, {"grammar": OBJECT, "logprobs": 1})),
    "tools": Feature(decoding({"grammar": CALL}, {"grammar": HERMES}, {"grammar": THINKING})),
    "log_probabilities": Feature(
        decoding(
            {"logprobs": 3},
            {"logprobs": 0, "prompt_logprobs": 2},
            {"logprobs": -1, "prompt_logprobs": -1},
            {"prompt_logprobs": 0},
        )
    ),
    "stop_strings": Feature(stops=True),
    "prefix_hit": Feature(alike, first=2),
    "preemption": Feature(long, blocks=TIGHT),
    "abort_of_a_mate": Feature(mates=4),
    **BEHIND,
}


def drawn_seed() -> int:
    return int(os.environ.get("LOCKSTEP_FEATURES_SEED", "0"))


def cells() -> list[object]:
    every = [
        (drafter, hot, feature, rows)
        for drafter, hot, feature, rows in product(DRAFTERS, (False, True), FEATURES, (1, 8))
        if drafter != "none" or rows > 1
    ]
    drawn = set(random.Random(drawn_seed()).sample(every, DRAWN))
    return [
        pytest.param(
            *cell,
            id=f"{cell[0]}-{'sampled' if cell[1] else 'greedy'}-{cell[2]}-{cell[3]}",
            marks=() if cell in drawn else pytest.mark.slow,
        )
        for cell in every
    ]


@cache
def requests(hot: bool) -> list[Request]:
    """Prompts of a few tokens, so that what repeats can be drafted from them."""
    rng = random.Random(17)
    made = []
    for number, length in enumerate((1, 4, 9, 17, 17, 23, 30, 41)):
        prompt = tuple(rng.randrange(60, 65) for _ in range(length))
        sampling = Sampling((0.6, 1.0, 1.5)[number % 3], seed=number) if hot else Sampling()
        request = Request(f"r{number}", prompt, NEW, sampling, (EOS,), draft_len=number % 6)
        made.append(request)
    return made


@cache
def asked(hot: bool, name: str) -> tuple[list[Request], list[str]]:
    """The requests of a cell, and the stop string of each."""
    plain = requests(hot)
    if name == "plain":
        return plain, [""] * len(plain)
    feature = FEATURES[name]
    before = [Alone(answer.output.tokens, answer.text) for answer in alone(hot, "plain")]
    made = [
        feature.change(number, request, known)
        for number, (request, known) in enumerate(zip(plain, before, strict=True))
    ]
    stops = [known.text[4:6] if feature.stops else "" for known in before]
    return made, stops


@cache
def alone(hot: bool, name: str) -> list[Received]:
    """Without a drafter, one by one, on a replica that shares nothing."""
    made, stops = asked(hot, name)
    received = []
    for request, stop in zip(made, stops, strict=True):
        replica = replica_of("none", [], num_gpu_blocks_override=256, prefix_sharing=False)
        replica.grammars = Grammars(tokenizer(), [EOS], VOCAB)
        engine = LocalEngine(replica, SchedulerConfig(rows_max=1, draft_len=0, max_logprobs=-1))
        received += read(engine, [request], [stop])
    return received


def read(
    engine: LocalEngine, made: list[Request], stops: list[str], mates: int = 0
) -> list[Received]:
    """Submit them together with some that are aborted after a few batches, and run to the end."""
    others = [
        Request(f"mate{number}", (7, 8, number), 200, Sampling(), draft_len=3)
        for number in range(mates)
    ]
    received = []
    for number, (request, stop) in enumerate(zip(made, stops, strict=True)):
        if number < mates:
            engine.submit(others[number])
        stream = TextStream(tokenizer(), request.prompt, TextRules((stop,) if stop else ()))
        received.append(Received(engine.submit(request), stream))
    batches, left = 0, list(zip(made, received, strict=True))
    while engine.advance():
        batches += 1
        if batches % 2 == 0 and others:
            engine.cancel(others.pop(0).id)
        for request, got in list(left):
            piece = got.stream.push(got.output.tokens[got.taken :])
            got.text += piece.text
            got.taken += piece.tokens
            got.stop = piece.stop
            if got.stop is not None:
                left.remove((request, got))
                engine.cancel(request.id)
    for _, got in left:
        piece = got.stream.finish()
        got.text, got.stop = got.text + piece.text, piece.stop
    return received


@pytest.mark.parametrize(("drafter", "hot", "name", "rows"), cells())
def test_a_request_receives_what_it_receives_alone_without_a_drafter(
    drafter: str, hot: bool, name: str, rows: int
) -> None:
    feature, (made, stops) = FEATURES[name], asked(hot, name)
    expected = alone(hot, name)
    answered = [
        (request, answer.output.tokens) for request, answer in zip(made, expected, strict=True)
    ]
    # A GPU gives the same bits in this mode alone.
    settings = {"num_gpu_blocks_override": feature.blocks, "deterministic": DEVICE != "cpu"}
    replica = replica_of(drafter, answered, **settings)
    replica.grammars = Grammars(tokenizer(), [EOS], VOCAB)
    tight = {"kv_reserve": 0.0} if feature.blocks == TIGHT else {}
    config = SchedulerConfig(
        rows_max=rows, draft_len=5, prefill_tokens_max=32, max_logprobs=-1, **tight
    )
    engine = LocalEngine(replica, config, check=True)
    received = read(engine, made[: feature.first], stops[: feature.first])
    received += read(engine, made[feature.first :], stops[feature.first :], feature.mates)
    for request, got, known in zip(made, received, expected, strict=True):
        assert got.whole == known.whole, request
    if feature.stops:
        assert all(got.stop is not None for got in received)
    if name == "prefix_hit":
        assert sum(got.output.usage.cached_tokens for got in received) > 0
    if name == "preemption" and rows > 1:
        assert engine.scheduler.snapshot().preempted > 0
    drafted = sum(got.output.usage.draft_tokens for got in received)
    assert (drafted > 0) == (drafter != "none")
    replica.check_integrity()
    assert replica.residents == ()


def behind_cells() -> list[object]:
    """`make test` runs the model at batch 8 with drafts of 4."""
    every = product(DRAFTERS, (1, 8), (0, 4), (False, True), BEHIND)
    return [
        pytest.param(
            *cell,
            id=f"{cell[0]}-{cell[1]}-{cell[2]}-{'sampled' if cell[3] else 'greedy'}-{cell[4]}",
            marks=() if cell[:3] == ("model", 8, 4) else pytest.mark.slow,
        )
        for cell in every
        if cell[0] != "none"
    ]


@pytest.mark.parametrize(("drafter", "rows", "draft_len", "hot", "name"), behind_cells())
def test_what_follows_reasoning_is_the_same_with_every_drafter(
    drafter: str, rows: int, draft_len: int, hot: bool, name: str
) -> None:
    made, stops = asked(hot, name)
    expected = alone(hot, name)
    answered = [
        (request, answer.output.tokens) for request, answer in zip(made, expected, strict=True)
    ]
    replica = replica_of(
        drafter, answered, num_gpu_blocks_override=2048, deterministic=DEVICE != "cpu"
    )
    replica.grammars = Grammars(tokenizer(), [EOS], VOCAB)
    engine = LocalEngine(replica, SchedulerConfig(rows_max=rows, draft_len=draft_len))
    some = [replace(request, draft_len=None) for request in made]
    for got, known in zip(read(engine, some, stops), expected, strict=True):
        assert got.whole == known.whole
    ends = [known.output.tokens.index(IDS["[/THINK]"]) for known in expected]
    assert all(end < NEW for end in ends), "the structure begins within the limit"
    assert any(known.output.tokens[-1] == EOS for known in expected), "and may end within it"
    drafted = sum(result.draft_tokens for step in engine.results for result in step.rows)
    assert (drafted > 0) == (draft_len > 0)
