"""Puts requests to a cluster and judges every answer against that of an undisturbed run.

Strict: whatever ends with an error is lost, unless this client cancelled it or its own deadline had
passed; and then the tokens that it did get must be the first of the right ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import grpc
from google.protobuf.json_format import MessageToJson

from cluster.client import NO_RETRY, AsyncClient, RetryPolicy
from protos import lockstep_pb2 as pb
from replicas.config import ReplicaConfig
from tests.chaos.answers import Answer, cut, fake_bases
from tests.cluster import fakes

ANSWER_S_MAX = 240.0
"""A request that has no end after so long hangs, and counts as lost."""
PLAIN = 2
"""A first token of prompts that asks fakes for no trouble."""
_EARLY = 0.9
"""A deadline may not be called passed before this share of it."""
_LATE_S = 20.0
"""Nor so long after it."""


@dataclass(frozen=True, eq=False)
class Ask:
    """A request and its right answer."""

    message: pb.GenerateRequest
    right: Answer
    stream: bool = True
    cancel_after_s: float | None = None


class Verdict(StrEnum):
    RIGHT = "right"
    CANCELLED = "cancelled"
    """By this client, with the right tokens so far."""
    DEADLINE = "deadline"
    """Its own deadline has passed; the right tokens so far."""
    LOST = "lost"
    DOUBLED = "doubled"
    """There are too many tokens."""
    WRONG = "wrong"


GOOD = frozenset({Verdict.RIGHT, Verdict.CANCELLED, Verdict.DEADLINE})


@dataclass(eq=False)
class Outcome:
    """What came of one request. Times are of the monotonic clock."""

    ask: Ask
    began_s: float
    ended_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: pb.End | None = None
    silence_s: float = 0.0
    """Longest time between two chunks."""
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    cancelled: bool = False
    http: bool = False
    """Over OpenAI's API, by a client that continues; else over gRPC."""

    @property
    def total_s(self) -> float:
        return self.ended_s - self.began_s

    def verdict(self) -> Verdict:
        """How it compares with the undisturbed answer."""
        right = self.ask.right
        tokens = tuple(self.tokens)
        if len(tokens) > len(right.tokens):
            return Verdict.DOUBLED
        if tokens != right.tokens[: len(tokens)] or not right.text.startswith(self.text):
            return Verdict.WRONG
        if self.end is None and self.cancelled:
            return Verdict.CANCELLED
        if self.code is not grpc.StatusCode.OK:
            if self.end is not None and self.text != right.text_after(len(tokens)):
                return Verdict.WRONG
            return Verdict.DEADLINE if self._deadline_passed() else Verdict.LOST
        if self.end is None:
            return Verdict.LOST
        whole = (tokens, self.text, self.end.finish_reason)
        due = (right.tokens, right.text, right.reason)
        return Verdict.RIGHT if whole == due else Verdict.WRONG

    def _deadline_passed(self) -> bool:
        message = self.ask.message
        if not message.HasField("timeout_s"):
            return False
        passed = self.code is grpc.StatusCode.DEADLINE_EXCEEDED
        return passed and _EARLY * message.timeout_s <= self.total_s <= message.timeout_s + _LATE_S

    def sentence(self) -> str:
        """For people: what is wrong with it. Tests have no secrets in their prompts."""
        right = len(self.ask.right.tokens)
        return (
            f"{self.ask.message.request_id}: {self.verdict()}: {self.code.name} {self.details!r}, "
            f"{len(self.tokens)} of {right} tokens, after {self.total_s:.2f} s of "
            f"{self.ask.message.timeout_s or 'any'}, {'HTTP' if self.http else 'gRPC'}, "
            f"{'stream' if self.ask.stream else 'unary'}, "
            f"priority {self.ask.message.priority}, "
            f"end: {MessageToJson(self.end, indent=None) if self.end else 'none'}"
        )


async def put(client: AsyncClient, ask: Ask, bound_s: float = ANSWER_S_MAX) -> Outcome:
    """One request to its end. Never raises for what the cluster does."""
    outcome = Outcome(ask, time.monotonic())
    try:
        async with asyncio.timeout(bound_s):
            try:
                async with asyncio.timeout(ask.cancel_after_s):
                    await (_stream if ask.stream else _unary)(client, outcome)
            except TimeoutError:
                outcome.cancelled = True
    except TimeoutError:
        outcome.code = grpc.StatusCode.UNKNOWN
        outcome.details = f"no end within {bound_s:.0f} s"
    except grpc.RpcError as error:
        outcome.code = error.code()
        outcome.details = error.details() or ""
    outcome.ended_s = time.monotonic()
    return outcome


async def _unary(client: AsyncClient, outcome: Outcome) -> None:
    response = await client.generate(outcome.ask.message)
    outcome.tokens.extend(response.token_ids)
    outcome.text = response.text
    outcome.end = response.end


async def _stream(client: AsyncClient, outcome: Outcome) -> None:
    last_s: float | None = None
    async for chunk in client.stream(outcome.ask.message):
        now_s = time.monotonic()
        outcome.silence_s = max(outcome.silence_s, now_s - (last_s or now_s))
        last_s = now_s
        outcome.tokens.extend(chunk.token_ids)
        outcome.text += chunk.text
        outcome.end = chunk.end if chunk.HasField("end") else outcome.end


def fake_asks(
    count: int, first: int = PLAIN, tokens: int = 60, name: str = "", stream: bool = False
) -> list[Ask]:
    """Streams and unary calls in turn, or only streams, of several lengths, answered by the target
    of this name; the prompts begin with `first`."""
    prompts = [[first, *range(10 + n, 14 + n + n % 3)] for n in range(count)]
    text = fakes.load_fake_text(ReplicaConfig())
    return [
        Ask(
            pb.GenerateRequest(
                prompt_token_ids=pb.TokenIds(ids=base.prompt),
                max_new_tokens=tokens,
                ignore_eos=True,
                request_id=f"{first}-{number}",
            ),
            cut(base, text, tokens, ignore_eos=True),
            stream=stream or number % 2 == 0,
        )
        for number, base in enumerate(fake_bases(prompts, tokens, name))
    ]


def serve(
    address: str,
    asks: Sequence[Ask],
    disturb: Callable[[], None] = lambda: None,
    retry: RetryPolicy = NO_RETRY,
    again: bool = False,
) -> list[Outcome]:
    """All at once, each tried once only; disturbs meanwhile, on a thread.

    `again`: each again and again, one after the other, until `disturb` has ended. So the load lasts
    as long as the disturbance, however fast the machine is.
    """

    async def run() -> list[Outcome]:
        async with AsyncClient(address, retry=retry) as client:
            disturbing = asyncio.create_task(asyncio.to_thread(disturb))

            async def repeat(ask: Ask) -> list[Outcome]:
                outcomes = [await put(client, ask)]
                while again and not disturbing.done():
                    outcomes.append(await put(client, ask))
                return outcomes

            each = await asyncio.gather(*map(repeat, asks))
            await disturbing
        return [outcome for outcomes in each for outcome in outcomes]

    return asyncio.run(run())


def longest_silence_s(outcomes: Sequence[Outcome]) -> float:
    """Within a stream."""
    return max((outcome.silence_s for outcome in outcomes), default=0.0)


def recovered(outcomes: Sequence[Outcome]) -> list[int]:
    """How often each request that has ended began again."""
    return [outcome.end.recovered for outcome in outcomes if outcome.end is not None]


def all_right(outcomes: Sequence[Outcome]) -> None:
    """Raises AssertionError that tells of each answer that is not the undisturbed one."""
    bad = [outcome.sentence() for outcome in outcomes if outcome.verdict() is not Verdict.RIGHT]
    assert not bad, "\n".join(bad)
