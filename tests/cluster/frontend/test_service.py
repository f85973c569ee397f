"""Proves: the sequences of one call are those of as many single calls, with the seeds that the call
documents, and are admitted, charged, refused and cancelled together.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from grpc import StatusCode

from cluster.config_sources import from_args
from cluster.frontend.admission.control import Caller
from cluster.frontend.admission.keys import add
from cluster.frontend.calls import Delta, GenerateCall, TextPrompt, TokenPrompt
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refused
from scheduler.messages import FinishReason
from tests.cluster.frontend.rig import CONFIG, PROMPT, PROMPT_IDS, frontend, unfinished
from tests.cluster.wire import until

HERE = Caller(address="127.0.0.1")
CALL = GenerateCall(
    caller=HERE,
    prompts=(TextPrompt(PROMPT), TokenPrompt(PROMPT_IDS[:1])),
    choices=3,
    temperature=1.0,
    seed=2**63 - 2,
    max_new_tokens=25,
)


async def answers(service: FrontendService, call: GenerateCall) -> dict[int, list[Delta]]:
    """The deltas of each sequence."""
    deltas: dict[int, list[Delta]] = defaultdict(list)
    async with service.open(call) as answer:
        async for delta in answer:
            deltas[delta.index].append(delta)
    return deltas


def text_and_tokens(deltas: list[Delta]) -> tuple[str, list[int]]:
    tokens = [token for delta in deltas for token in delta.tokens]
    return "".join(delta.text for delta in deltas), tokens


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stop", [(), ("e",)], ids=["whole", "stop"])
async def test_every_sequence_is_the_one_of_a_call_of_its_own(
    stream: bool, stop: tuple[str]
) -> None:
    async with frontend(step_s=0.001) as made:
        service = made.service
        call = replace(CALL, stream=stream, stop=stop)
        whole = await answers(service, call)
        assert sorted(whole) == list(range(6))
        for index, deltas in whole.items():
            prompt, choice = divmod(index, 3)
            seed = (2**63 - 2 + choice) % 2**63
            single = replace(call, prompts=(call.prompts[prompt],), choices=1, seed=seed)
            assert text_and_tokens(deltas) == text_and_tokens((await answers(service, single))[0])
            assert [delta.end is not None for delta in deltas] == [False] * (len(deltas) - 1) + [
                True
            ]
            assert deltas[-1].end is not None
            assert deltas[-1].end.seed == seed
            assert stream or len(deltas) == 1


async def test_a_server_with_a_seed_samples_with_it_what_names_none() -> None:
    async with frontend(config=CONFIG.model_copy(update={"seed": 2**63 - 2})) as made:
        call = replace(CALL, seed=None)
        first, again = await answers(made.service, call), await answers(made.service, call)
        ends = [first[index][-1].end for index in range(6)]
        assert [end.seed for end in ends if end] == [2**63 - 2, 2**63 - 1, 0, 1, 2, 3]
        for index, deltas in first.items():
            assert text_and_tokens(deltas) == text_and_tokens(again[index])
        named = await answers(made.service, replace(CALL, seed=5))
        assert named[0][-1].end is not None
        assert named[0][-1].end.seed == 5


async def test_sequences_are_admitted_and_charged_together(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    tokens = 3 * (len(PROMPT_IDS) + 400)
    caller = Caller((f"Bearer {add(path, 'alice', tokens_per_minute=tokens, requests_max=4)}",))
    prompts = (TextPrompt(PROMPT),)
    config = from_args({"auth": {"keys_file": str(path)}})
    async with frontend(step_s=0.05, config=config) as made:
        service = made.service
        call = replace(CALL, caller=caller, prompts=prompts, max_new_tokens=400)
        running = asyncio.ensure_future(answers(service, call))
        await until(lambda: unfinished(service) == 3)
        for number, choices, code, field, said in (
            (1, 1, StatusCode.RESOURCE_EXHAUSTED, "", "tokens_per_minute of key alice are used up"),
            (1, 2, StatusCode.RESOURCE_EXHAUSTED, "", "in flight"),
            (1, 5, StatusCode.PERMISSION_DENIED, "n", "at most 4"),
            (5, 1, StatusCode.PERMISSION_DENIED, "prompt", "at most 4"),
        ):
            with pytest.raises(Refused, match=said) as refused:
                await answers(service, replace(call, prompts=prompts * number, choices=choices))
            assert (refused.value.refusal.code, refused.value.refusal.field) == (code, field)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: not unfinished(service))
        assert len(await answers(service, replace(call, choices=4, max_new_tokens=1))) == 4


async def test_one_sequence_that_is_not_served_in_full_ends_the_call() -> None:
    async with frontend(step_s=0.02) as made:
        service = made.service
        call = replace(CALL, max_new_tokens=400, stream=True, timeout_s=0.2)
        deltas = await answers(service, call)
        ends = [delta.end for got in deltas.values() for delta in got if delta.end]
        assert [end.reason for end in ends] == [FinishReason.DEADLINE]
        assert ends[0].refusal is not None
        assert ends[0].refusal.code is StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not unfinished(service))
