"""Proves: killing an ingress and then Serve's proxy under running calls costs the client's caller
neither a token nor a character, and no call.

Two ingresses, two fake replicas, one proxy, started as `lockstep serve` starts them; streams with
stop strings, with sampling and without, and unary calls beside them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from cluster.client import AsyncClient, RetryPolicy
from cluster.config import from_args
from protos import lockstep_pb2 as pb
from tests.integration.conftest import free_port
from tests.integration.killable import Killable, killable_cluster

pytestmark = pytest.mark.ray

STREAMS = 12
UNARY = 4
TOKENS = 400
INGRESS, PROXY = "#ingress#", "SERVE_PROXY"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Killable]:
    config = from_args(
        {
            "replicas": 2,
            "target": "fake",
            "draft": "fake",
            "grpc_port": free_port(),
            "http_port": free_port(),
            "ingress": {"number": 2},
        }
    )
    with killable_cluster(config, step_s=0.03) as running:
        yield running


def request(number: int) -> pb.GenerateRequest:
    """Every third one samples; every other one has a stop string that only ever begins."""
    made = pb.GenerateRequest(
        prompt=f"héllo {'wörld ' * (number % 4)}{number}",
        max_new_tokens=TOKENS,
        ignore_eos=True,
        request_id=str(number),
    )
    if number % 3 == 0:
        made.temperature, made.seed = 1.0, number
    if number % 2:
        made.stop.extend(["e" + "never", "\ufffdnever", " never"])
    return made


@dataclass
class Answer:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    end: pb.End | None = None
    silence_s: float = 0.0


@dataclass
class Run:
    """All calls at once; `disturb` begins once every stream flows."""

    answers: list[Answer]
    unary: list[pb.GenerateResponse]

    @property
    def outputs(self) -> list[tuple[str, list[int]]]:
        streamed = [(answer.text, answer.tokens) for answer in self.answers]
        return streamed + [(answer.text, list(answer.token_ids)) for answer in self.unary]


async def ask_all(address: str, disturb: Callable[[list[Answer]], None]) -> Run:
    answers = [Answer() for _ in range(STREAMS)]
    all_flow = asyncio.Event()

    async def one(client: AsyncClient, number: int) -> None:
        answer = answers[number]
        last_s = time.monotonic()
        async for chunk in client.stream(request(number)):
            now_s = time.monotonic()
            answer.silence_s = max(answer.silence_s, now_s - last_s if answer.tokens else 0.0)
            last_s = now_s
            answer.text += chunk.text
            answer.tokens.extend(chunk.token_ids)
            answer.ids.append(chunk.request_id)
            if all(other.tokens for other in answers):
                all_flow.set()
            if chunk.HasField("end"):
                answer.end = chunk.end

    policy = RetryPolicy(give_up_s=100.0, attempts_max=1000)
    async with AsyncClient(address, retry=policy) as client, asyncio.timeout(200):
        streams = [asyncio.ensure_future(one(client, number)) for number in range(STREAMS)]
        unary = [
            asyncio.ensure_future(client.generate(request(number)))
            for number in range(STREAMS, STREAMS + UNARY)
        ]
        await all_flow.wait()
        await asyncio.to_thread(disturb, answers)
        await asyncio.gather(*streams)
        return Run(answers, await asyncio.gather(*unary))


def test_a_killed_ingress_and_a_killed_proxy_cost_the_caller_nothing(cluster: Killable) -> None:
    reference = asyncio.run(ask_all(cluster.address, lambda _answers: None))
    assert all(len(tokens) == TOKENS for _, tokens in reference.outputs)

    def kill_both(answers: list[Answer]) -> None:
        assert cluster.kill(INGRESS) == 2
        time.sleep(1.0)
        assert not any(answer.end for answer in answers), "too late to break anything"
        assert cluster.kill(PROXY) == 1

    disturbed = asyncio.run(ask_all(cluster.address, kill_both))
    assert disturbed.outputs == reference.outputs
    for number, answer in enumerate(disturbed.answers):
        assert answer.end is not None
        assert answer.end.recovered >= 1, "the proxy was every stream's"
        assert answer.end.usage.completion_tokens == TOKENS
        assert answer.ids == [str(number)] + [""] * (len(answer.ids) - 1)
    silence_s = max(answer.silence_s for answer in disturbed.answers)
    print(f"ingress and proxy killed: longest silence of a stream {silence_s:.1f} s")
