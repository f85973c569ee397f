"""Proves, on a real cluster of two replicas: requests made to break it, from clients that ask
again, end with a status of their own, and the sound streams beside them neither change nor wait.

Four clients send 200 of them, of every kind that once took replicas down or stood them still. The
longest pause of a sound stream is compared with the longest without poison, on the same cluster.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping

import aiohttp
import pytest

from cluster.client import AsyncClient
from protos import lockstep_pb2 as pb
from tests.chaos.hosted import HostedCluster
from tests.integration.conftest import Expected

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STREAMS, TOKENS = 50, 96
POISONED, CLIENTS, RETRIES = 200, 4, 2
ANSWER_S = 240.0
LATE_S, TRIES = 0.5, 3
"""Poison may delay a token by so much. Another process of the machine may do so in one try, poison
would in each."""
PROMPTS = [f"sound {'stream ' * (n % 5)}number {n}" for n in range(STREAMS)]


def optional(count: int, kind: str) -> dict[str, object]:
    names = (f"k{number}" for number in range(count))
    return {"type": "object", "properties": {name: {"type": kind} for name in names}}


CIRCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
AMBIGUOUS = 'start: e\ne: e e e | e e | "a" | "b" | ""'
POISON: list[Mapping[str, object]] = [
    {"structured_outputs": {"choice": [f"opt{number}" for number in range(2000)]}},
    {"structured_outputs": {"choice": [f"opt{number}" for number in range(3000)]}},
    {"structured_outputs": {"json": CIRCLE}},
    {"structured_outputs": {"json": optional(500, "string")}},
    {"structured_outputs": {"json": {"anyOf": [{"type": "null"}, optional(600, "integer")]}}},
    {"structured_outputs": {"json": {"type": "integer", "multipleOf": 1500007}}},
    {"structured_outputs": {"json": {"type": "integer", "multipleOf": 400009}}},
    {"structured_outputs": {"grammar": AMBIGUOUS}, "max_tokens": 300},
    {"structured_outputs": {"grammar": "start: ("}},
    {"structured_outputs": {"regex": "[ab]{9}"}, "repetition_penalty": 1e38},
    {"repetition_penalty": 1e39},
    {"temperature": 1e-300, "logit_bias": {"5": 100}},
    {"prompt": [[5] * 450] * 128, "echo": True, "logprobs": 20},
]
"""The fields of a request, beside a prompt."""


async def poisoned(http: aiohttp.ClientSession, model: str, seen: Counter[int]) -> None:
    """One client of four: its share, one after the other, each again where the server is at
    fault, as SDKs do."""
    for number in range(POISONED // CLIENTS):
        fields = {"prompt": f"x{number}", "max_tokens": 8} | POISON[number % len(POISON)]
        for _ in range(1 + RETRIES):
            body = {"model": model, **fields}
            try:
                async with http.post("/v1/completions", json=body) as answer:
                    status, text = answer.status, await answer.text()
            except TimeoutError:
                pytest.fail(f"no answer in {ANSWER_S:g} s: {str(fields)[:500]}")
            seen[status] += 1
            if status < 500:
                break
        assert status in (200, 400, 429), (fields, text)
        if status == 400:
            assert json.loads(text)["error"]["param"], (fields, text)


async def streamed(many: AsyncClient, prompt: str) -> tuple[list[int], float]:
    """The tokens, and the longest pause before any of them."""
    tokens, longest_s, last_s = list[int](), 0.0, time.monotonic()
    request = pb.GenerateRequest(prompt=prompt, max_new_tokens=TOKENS, ignore_eos=True)
    async for chunk in many.stream(request):
        if chunk.token_ids:
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            tokens += chunk.token_ids
    return tokens, longest_s


async def sound(many: AsyncClient, until: asyncio.Event) -> tuple[list[list[int]], float]:
    """All streams at once, again until the event; the answers and the longest pause."""
    answers, longest_s = list[list[int]](), 0.0
    while not answers or not until.is_set():
        ended = await asyncio.gather(*(streamed(many, prompt) for prompt in PROMPTS))
        answers += [tokens for tokens, _ in ended]
        longest_s = max(longest_s, *(pause_s for _, pause_s in ended))
    return answers, longest_s


async def played(cluster: HostedCluster, poison: bool) -> tuple[list[list[int]], float]:
    done = asyncio.Event()
    model = cluster.config.model_name
    timeout = aiohttp.ClientTimeout(ANSWER_S)
    seen: Counter[int] = Counter()
    async with (
        AsyncClient(cluster.address) as many,
        aiohttp.ClientSession(cluster.http, timeout=timeout) as http,
        asyncio.TaskGroup() as group,
    ):
        running = group.create_task(sound(many, done))
        if poison:
            sent = (poisoned(http, model, seen) for _ in range(CLIENTS))
            await asyncio.gather(*sent)
        done.set()
    print("statuses of poison:", dict(seen))
    return running.result()


def test_poison_takes_no_replica_down_and_no_sound_stream_waits_for_it(
    cluster: HostedCluster, expected: Expected
) -> None:
    before = {replica.id for replica in cluster.wait_for_replicas(2).replicas}
    right = expected(PROMPTS, TOKENS)  # up to the end of each text, which the streams ignore
    asyncio.run(played(cluster, poison=False))  # whatever is slow the first time only
    late_s = []
    for _ in range(TRIES):
        first, usual_s = asyncio.run(played(cluster, poison=False))
        answers, longest_s = asyncio.run(played(cluster, poison=True))
        print(f"longest pause: {usual_s:.2f} s without poison, {longest_s:.2f} s with it")
        for answer, plain in zip(first, right, strict=False):
            assert answer[: len(plain)] == plain
        assert answers == first[:STREAMS] * (len(answers) // STREAMS)
        status = cluster.wait_until_idle()
        assert {replica.id for replica in status.replicas} == before, "a replica has left"
        late_s.append(longest_s - usual_s)
        if late_s[-1] <= LATE_S:
            return
    pytest.fail(f"a sound token was late by {late_s} s each time")
