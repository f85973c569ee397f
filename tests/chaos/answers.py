"""What an undisturbed run answers: for fakes computed, for a real pair generated alone beforehand.

A longer answer begins with the shorter one, so one generated answer per prompt and sampling serves
every limit, stop token and stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.config import ClusterConfig
from cluster.frontend.target_text import TargetText
from cluster.frontend.text import TextRules, TextStream
from protos import lockstep_pb2 as pb
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, Sampling
from tests.cluster import fakes

TOKENS_MAX = 200
"""Longest answer that a mix of requests asks for."""


@dataclass(frozen=True)
class Answer:
    """All that a client may receive, in full."""

    tokens: tuple[int, ...]
    text: str
    reason: int
    """pb.FinishReason."""
    text_after: Callable[[int], str] = field(compare=False, repr=False)
    """The text of an answer that ends for another reason after so many of the tokens: without what
    is held back of them, for whoever continues gets that."""


@dataclass(frozen=True)
class Base:
    """A prompt, how it is sampled, and the tokens that follow it whatever ends there."""

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: tuple[int, ...]


def cut(
    base: Base, text: TargetText, limit: int, ignore_eos: bool, stops: Sequence[str] = ()
) -> Answer:
    """The answer to a request that ends after `limit` tokens, at the end of text or at a stop."""
    tokens = base.tokens[:limit]
    assert len(tokens) == limit, "no longer answer is known"
    reason = pb.FINISH_REASON_LENGTH
    if not ignore_eos:
        for index, token in enumerate(tokens):
            if token in text.eos_token_ids:
                tokens, reason = tokens[: index + 1], pb.FINISH_REASON_STOP
                break

    stream = TextStream(text.tokenizer, base.prompt, TextRules(stops))
    piece = stream.push(tokens)
    said, stop = piece.text, piece.stop
    if stop is None:
        rest = stream.finish()
        said, stop = said + rest.text, rest.stop
    tokens = tokens[: piece.tokens]
    return Answer(
        tokens,
        said,
        reason if stop is None else pb.FINISH_REASON_STOP,
        lambda count: (
            TextStream(text.tokenizer, base.prompt, TextRules(stops)).push(tokens[:count]).text
        ),
    )


def fake_bases(
    prompts: Sequence[Sequence[int]], count: int = TOKENS_MAX, name: str = ""
) -> list[Base]:
    """The next `count` tokens each, of the target of this name. Fakes know no sampling: greedy."""
    return [
        Base(tuple(prompt), Sampling(), tuple(fakes.perfect(prompt, count, name=name)))
        for prompt in prompts
    ]


def real_bases(
    config: ClusterConfig, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
) -> list[Base]:
    """Each prompt with its sampling, alone, one token per step, in this process."""
    from cluster.local.engine import LocalEngine
    from replicas.replica import Replica

    engine = LocalEngine(Replica.load(config.replica), SchedulerConfig(rows_max=1, draft_len=0))
    bases = []
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        request = Request(str(number), tuple(prompt), TOKENS_MAX, sampling)
        (output,) = engine.generate([request])
        bases.append(Base(request.prompt, sampling, tuple(output.tokens)))
    return bases
