"""The oracle for what requests ask of decoding: penalties, biases, struck-out tokens, grammars,
sampling and log-probabilities are those of a plain loop over transformers, whatever drafts and runs
beside.

The plain loop reads the whole content anew for every token and changes one row of logits, by
sentences from the definitions; of the system it shares llguidance's verdict on a token, and noise.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.frontend.reasoning import REASONING_FORMATS, behind_reasoning
from cluster.frontend.structure import Markup, Structure
from cluster.frontend.tools import TOOL_FORMATS, Tool, ToolUse, tool_structure
from cluster.frontend.tools.use import Function
from cluster.local.engine import LocalEngine, Output
from replicas.grammars import Grammars, grammar_of
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.messages import Request, Sampling
from tests.oracle.drafters import replica_of
from tests.oracle.worlds import mixed_requests, run_staggered, sampled
from tests.replicas.pool import Failing
from tests.replicas.sampling.test_sampling import by_definition
from tests.tiny_pairs import DEVICE, VOCAB, target_model

EOS = 2
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", 7]}}, "required": ["a"]}
OBJECT = '{"type": "object"}'  # response_format json_object
TOOL = Tool(type="function", function=Function(name="f", parameters=SCHEMA, strict=True))
SCHEMA_TEXT = Structure("json_schema", (json.dumps(SCHEMA),))
SUMS = """start: sum
sum: /[1-9][0-9]{0,2}/ (" + " sum | " = " /[a-z]+/)"""


SPECIAL = {"[TOOL_CALLS]": "^", "[ARGS]": "|", "[THINK]": "@", "[/THINK]": "_"}
"""Markers of formats, and the characters whose tokens are special in their places."""
IDS = {marker: ord(char) - 29 for marker, char in SPECIAL.items()}
MARKUP = Markup(IDS)


def of_tool(
    choice: Any,
    form: str,
    text: Structure | None = None,
    reasons: str = "",
    budget: int | None = None,
) -> str:
    """The grammar of calls and text, behind reasoning of this format, which has begun if it has
    tokens for its budget."""
    structure = tool_structure(ToolUse((TOOL,), choice), TOOL_FORMATS[form], MARKUP, text)
    if reasons:
        opened = None if budget is None else True
        structure = behind_reasoning(REASONING_FORMATS[reasons], opened, structure, MARKUP, budget)
    assert structure is not None
    return grammar_of(*structure.described)


def thought(reasons: str, opened: bool | None, budget: int | None = None) -> str:
    """The grammar of the schema behind reasoning, which has tokens for its budget."""
    schema = Structure("json_schema", (json.dumps(SCHEMA),))
    form = REASONING_FORMATS[reasons]
    structure = behind_reasoning(form, opened, schema, MARKUP, budget)
    assert structure is not None
    return grammar_of(*structure.described)


THINKS = ((IDS["[/THINK]"], 3.0), (IDS["[THINK]"], 9.0))
CALL = of_tool("required", "llama3_json")
ASKS = (
    Decoding(0, logprobs=3),
    Decoding(0, repetition_penalty=1.7),
    Decoding(0, frequency_penalty=0.9, presence_penalty=-0.4, logprobs=0),
    Decoding(0, logit_bias=((5, 3.5), (40, -100.0), (41, 4.0))),
    Decoding(0, min_tokens=9, logit_bias=((EOS, 30.0),)),
    Decoding(0, allowed_token_ids=(5, 9, 41, 42, 60), logprobs=0, logprob_token_ids=(70, 5, 3)),
    Decoding(0, allowed_token_ids=(EOS, *range(30, 60)), min_tokens=7, presence_penalty=0.7),
    Decoding(0, grammar=grammar_of("json_schema", [json.dumps(SCHEMA)]), logprobs=2),
    Decoding(0, grammar=grammar_of("regex", ["[a-f]{3}(x[0-9])*y"]), repetition_penalty=1.3),
    Decoding(0, grammar=grammar_of("choice", ["yes", "no", "nothing at all"])),
    Decoding(0, presence_penalty=1.5, repetition_penalty=1.2, logit_bias=((3, 1.0),), logprobs=1),
    Decoding(0, logit_bias=((5, 4.0), (96, -9.0)), grammar=grammar_of("json_schema", [OBJECT])),
    Decoding(0, grammar=grammar_of("grammar", [SUMS]), logprobs=1),
    Decoding(0, grammar=CALL, frequency_penalty=0.5),
    Decoding(0, grammar=of_tool("auto", "hermes")),
    Decoding(0, grammar=thought("mistral", True, budget=5), logprobs=1),
    Decoding(
        0,
        grammar=thought("mistral", None),
        logit_bias=((IDS["[/THINK]"], 3.0), (IDS["[THINK]"], 9.0)),
    ),
    Decoding(0, grammar=of_tool("required", "mistral", reasons="mistral")),
    Decoding(0, grammar=of_tool("auto", "qwen3_coder", SCHEMA_TEXT, "qwen3"), presence_penalty=0.4),
    Decoding(0, grammar=of_tool("required", "pythonic", reasons="deepseek_r1")),
)
RUNS = [
    *(
        (drafter, rows, k)
        for drafter in ("none", "model", "suffix", "eagle3", "dflash", "dspark", "clover", "half")
        for rows, k in ((1, 0), (1, 4), (8, 0), (8, 4), (8, None))
        if drafter != "none" or k != 4
    ),
    *((drafter, rows, 4) for drafter in ("never", "always") for rows in (1, 8)),
]


@cache
def tokenizer() -> Tokenizer:
    """One token for each printable character but `, which a new line stands for, after three
    special ones; some of them are special, too."""
    byte_level = {32: "Ġ", 96: "Ċ"}
    vocab = {"<pad>": 0, "<s>": 1, "</s>": EOS}
    for token in range(3, VOCAB):
        vocab[byte_level.get(token + 29, chr(token + 29))] = token
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<s>", "</s>", *SPECIAL.values()])
    return made


@cache
def requests() -> tuple[Request, ...]:
    """Two of each kind, the second sampled, as most are, with bad words made of what the first one
    says."""
    plain = mixed_requests(VOCAB, 2 * len(ASKS), seed=11, new=(12, 24))
    made = []
    for number, request in enumerate([*plain[: len(ASKS)], *sampled(plain)[len(ASKS) :]]):
        decoding = replace(ASKS[number % len(ASKS)], prompt_tokens=len(request.prompt))
        if number >= len(ASKS) and not (decoding.grammar or decoding.allowed_token_ids):
            said = plainly(made[number - len(ASKS)])[0]
            words = [tuple(said[at : at + size]) for at, size in ((0, 1), (2, 2), (4, 3))]
            decoding = replace(decoding, bad_words=tuple(word for word in words if word))
        new = 45 if decoding.grammar == CALL else request.max_new_tokens
        made.append(replace(request, max_new_tokens=new, decoding=decoding, stop_token_ids=(EOS,)))
    return tuple(made)


@cache
def plainly(request: Request) -> tuple[list[int], list[torch.Tensor]]:
    """New tokens by the plain loop, and the log-softmax of each place's own logits."""
    model, decoding = target_model("llama"), request.decoding
    assert decoding is not None
    content, new, told = list(request.prompt), list[int](), []
    allowed = Allowed(decoding.grammar)
    while len(new) < request.max_new_tokens and EOS not in new:
        with torch.no_grad():
            logits = model(torch.tensor([content])).logits[0, -1].float()
        told.append(logits.log_softmax(-1))
        logits = changed(logits.clone(), request, new, allowed)
        token = picked(logits, request.sampling, len(content))
        new.append(token)
        content.append(token)
        allowed.take(token)
    return new, told


def changed(
    logits: torch.Tensor, request: Request, new: Sequence[int], allowed: Allowed
) -> torch.Tensor:
    decoding = request.decoding
    assert decoding is not None
    for token in {*request.prompt, *new}:
        if logits[token] > 0:
            logits[token] /= decoding.repetition_penalty
        else:
            logits[token] *= decoding.repetition_penalty
    for token in set(new):
        logits[token] -= decoding.frequency_penalty * new.count(token)
        logits[token] -= decoding.presence_penalty
    for token, bias in decoding.logit_bias:
        logits[token] += bias
    for token in range(VOCAB) if decoding.allowed_token_ids else ():
        if token not in decoding.allowed_token_ids:
            logits[token] = -torch.inf
    if len(new) < decoding.min_tokens:
        logits[EOS] = -torch.inf
    for *rest, last in decoding.bad_words:
        if list(new[len(new) - len(rest) :]) == rest:
            logits[last] = -torch.inf
    for token in range(VOCAB):
        if not allowed.permits(token):
            logits[token] = -torch.inf
    return logits


def picked(logits: torch.Tensor, sampling: Sampling, place: int) -> int:
    """The token at this place: of those that no filter strikes out, the best after noise."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return by_definition(logits, sampling, place)


class Allowed:
    """Whether a token may come next, asked one by one."""

    def __init__(self, grammar: str) -> None:
        tokens = LLTokenizer(tokenizer().to_str(), n_vocab=VOCAB, eos_token=EOS)
        self._matcher = LLMatcher(tokens, grammar) if grammar else None

    def permits(self, token: int) -> bool:
        if self._matcher is None:
            return True
        if self._matcher.is_stopped():  # the text is complete
            return token == EOS
        return self._matcher.validate_tokens([token]) == 1

    def take(self, token: int) -> None:
        if self._matcher is not None:
            self._matcher.consume_token(token)


def asked_replica(drafter: str) -> Replica:
    answered = [(request, plainly(request)[0]) for request in requests()]
    # A GPU gives the same bits in this mode alone.
    replica = replica_of(
        drafter, answered, num_gpu_blocks_override=2048, deterministic=DEVICE != "cpu"
    )
    replica.grammars = Grammars(tokenizer(), [EOS], VOCAB)
    return replica


@cache
def alone() -> list[Output]:
    engine = LocalEngine(asked_replica("none"), SchedulerConfig(rows_max=1, draft_len=0))
    return engine.generate(requests())


def agree(request: Request, output: Output) -> None:
    new, told = plainly(request)
    assert output.tokens == new, request
    decoding = request.decoding
    assert decoding is not None
    if decoding.logprobs is None:
        assert output.logprobs == []
        return
    assert len(output.logprobs) == len(new)
    for token, said, plain in zip(new, output.logprobs, told, strict=True):
        assert said.logprob == pytest.approx(float(plain[token]), abs=1e-4)
        if named := decoding.logprob_token_ids:
            assert tuple(other for other, _ in said.top) == named
        else:
            assert len(said.top) == decoding.logprobs
            best = plain.topk(decoding.logprobs).values.tolist()
            assert [logprob for _, logprob in said.top] == pytest.approx(best, abs=1e-4)
        for other, logprob in said.top:
            assert logprob == pytest.approx(float(plain[other]), abs=1e-4)
            assert other != token or logprob == said.logprob
        assert said.rank == 1 + sum(float(p) > float(plain[token]) for p in plain)


@pytest.mark.long
@pytest.mark.parametrize(("drafter", "rows_max", "draft_len"), RUNS)
def test_outputs_are_those_of_the_plain_loop(
    drafter: str, rows_max: int, draft_len: int | None
) -> None:
    replica = asked_replica(drafter)
    outputs = run_staggered(replica, requests(), rows_max, draft_len, seed=rows_max)
    for request, output, expected in zip(requests(), outputs, alone(), strict=True):
        agree(request, output)
        assert output.logprobs == expected.logprobs, "the same bits"
    end = IDS["[/THINK]"]
    ended = [plainly(request)[0][-1] == EOS for request in requests() if request.decoding.grammar]
    assert any(ended), "a grammar comes to its end within the limit"
    thoughts = [end in plainly(request)[0][:-1] for request in requests()]
    assert any(thoughts), "reasoning ends within the limit, and a structure begins"


@pytest.mark.parametrize("drafter", ["none", "model", "suffix", "eagle3", "half"])
def test_log_probabilities_of_a_prompt_are_those_of_one_forward_pass(drafter: str) -> None:
    """Of a long one that is filled in several batches, of one whose prefix is here, of a single
    token."""
    rng = random.Random(5)
    prefix = [rng.randrange(VOCAB) for _ in range(90)]
    prompts = [prefix, [*prefix[:60], 5, 6, 7], [9]]
    some = [
        Request(
            id=f"p{number}",
            prompt=tuple(prompt),
            max_new_tokens=2,
            decoding=Decoding(len(prompt), prompt_logprobs=2),
        )
        for number, prompt in enumerate(prompts)
    ]
    replica = asked_replica(drafter)
    config = SchedulerConfig(rows_max=4, prefill_tokens_max=32, prefill_rows_max=1)
    engine = LocalEngine(replica, config, check=True)
    for request in some:
        output = engine.generate([request])[0]
        with torch.no_grad():
            plain = target_model("llama")(torch.tensor([request.prompt])).logits[0].log_softmax(-1)
        assert len(output.prompt_logprobs) == len(request.prompt) - 1
        for place, said in enumerate(output.prompt_logprobs):
            token = request.prompt[place + 1]
            assert said.logprob == pytest.approx(float(plain[place, token]), abs=1e-4)
            best = plain[place].topk(2).values.tolist()
            assert [logprob for _, logprob in said.top] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("rows_max", [1, 8])
@pytest.mark.parametrize("drafter", ["none", "model", "eagle3"])
def test_the_whole_vocabulary_is_told_of_as_the_first_five_are(drafter: str, rows_max: int) -> None:
    """To the last bit, of greedy and of sampled tokens, and of those of a prompt."""
    told = []
    for count in (5, -1):
        some = [
            replace(
                request,
                decoding=Decoding(len(request.prompt), logprobs=count, prompt_logprobs=count),
            )
            for request in sampled(mixed_requests(VOCAB, 8, seed=4, new=(6, 12)))
        ]
        config = SchedulerConfig(rows_max=rows_max, draft_len=4, max_logprobs=-1)
        told.append(LocalEngine(asked_replica(drafter), config).generate(some))
    for few, every in zip(*told, strict=True):
        assert few.tokens == every.tokens
        assert [len(few.logprobs), len(few.prompt_logprobs)] == [
            len(every.logprobs),
            len(every.prompt_logprobs),
        ]
        pairs = zip(
            [*few.logprobs, *few.prompt_logprobs],
            [*every.logprobs, *every.prompt_logprobs],
            strict=True,
        )
        for first, whole in pairs:
            assert (first.logprob, first.rank) == (whole.logprob, whole.rank)
            assert first.top == whole.top[:5]
            assert {token for token, _ in whole.top} == set(range(VOCAB))


def test_what_a_grammar_forces_is_drafted_whatever_the_drafter_says() -> None:
    text = "nothing at all"
    grammar = grammar_of("choice", [text])
    one = replace(requests()[0], decoding=Decoding(len(requests()[0].prompt), grammar=grammar))
    for drafter in ("model", "suffix"):
        engine = LocalEngine(asked_replica(drafter), SchedulerConfig(draft_len=4))
        (output,) = engine.generate([one])
        assert tokenizer().decode(output.tokens) == text
        # Five at most in a step; its end is no part of the text.
        assert sum(result.steps for result in engine.results) <= 1 + len(text) // 5


def test_a_batch_that_fails_leaves_rows_as_they_were() -> None:
    """Some steps commit, one breaks, and the same batch runs again."""
    runner = Failing(asked_replica("model"), share=1.0)
    engine = LocalEngine(runner, SchedulerConfig(rows_max=8, draft_len=3))
    for begin in range(0, len(requests()), 8):  # where more wait, a batch is of one step
        some = requests()[begin : begin + 8]
        for request, output in zip(some, engine.generate(some), strict=True):
            agree(request, output)
    assert runner.failed
