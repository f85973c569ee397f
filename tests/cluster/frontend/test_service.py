"""Proves: the sequences of one call are those of as many single calls, with the seeds that the call
documents, and are admitted, charged, refused and cancelled together; each end of a call is told,
counted and continued for what it was.

The frontend talks to a pool in the same event loop. Where an end must come at a certain token,
there is no replica, and the test says what the pool would have said.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from cluster.config import AuthConfig
from cluster.config_sources import from_args
from cluster.frontend.admission.control import Caller
from cluster.frontend.admission.keys import add
from cluster.frontend.calls import Delta, GenerateCall
from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.pool_session import InFlightRequest
from cluster.frontend.prompts import TextPrompt, TokenPrompt
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import CODES, Refusal, Refused, refusal_of_finish
from cluster.frontend.text import TextStream
from protos import lockstep_pb2 as pb
from scheduler.messages import Finish, FinishReason, Reject, RejectCode
from tests.cluster.fakes import ClockAhead, tokenizer
from tests.cluster.frontend.rig import (
    CONFIG,
    PROMPT,
    PROMPT_IDS,
    Context,
    Late,
    asked,
    brings,
    ends,
    frontend,
    pool_of,
    session_of,
    stream,
    text_of,
    unfinished,
)
from tests.cluster.pool.rig import Stuck
from tests.cluster.scripted import joined
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
            assert not any(delta.end for delta in deltas[:-1])
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
    stuck = Stuck()
    async with frontend(load=lambda: stuck, config=config) as made:
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
        stuck.let_go.set()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: not unfinished(service))
        assert len(await answers(service, replace(call, choices=4, max_new_tokens=1))) == 4


async def test_one_sequence_that_is_not_served_in_full_ends_the_call() -> None:
    clock = ClockAhead()
    async with frontend(clock=clock, load=lambda: Late(clock)) as made:
        service = made.service
        call = replace(CALL, max_new_tokens=400, stream=True)
        deltas = await answers(service, call)
        ends = [delta.end for got in deltas.values() for delta in got if delta.end]
        assert [end.reason for end in ends] == [FinishReason.DEADLINE]
        assert ends[0].refusal is not None
        assert ends[0].refusal.code is StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not unfinished(service))


# --------------------------------------------------------------------------- ends


ANSWER = "a \U0001f98a says END or ENDE"
TOKENS = tokenizer().encode(ANSWER).ids
UNENDED = [FinishReason.DEADLINE, FinishReason.FAILED, FinishReason.CANCELLED]


async def streamed(
    made: GrpcApi, request: pb.GenerateRequest, tokens: list[int], reason: FinishReason
) -> tuple[str, list[int], Context]:
    """Text and tokens of a stream that the pool gives these tokens and this end."""
    context = Context()
    call = asyncio.ensure_future(stream(made, request, context))
    live = await asked(made)
    brings(made, live, tokens)
    ends(made, live, reason)
    chunks = await call
    assert chunks[-1].HasField("end")
    return *joined(chunks), context


@pytest.mark.parametrize("reason", UNENDED)
@pytest.mark.parametrize(
    "stops", [[], ["ENDLESS"], ["ENDE"], ["\U0001f98a!"]], ids=["none", "never", "last", "fox"]
)
async def test_what_was_cut_and_continued_is_what_was_never_cut(
    stops: list[str], reason: FinishReason
) -> None:
    async with frontend(replicas=0) as made:
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=len(TOKENS), stop=stops)
        whole, tokens, _ = await streamed(made, request, TOKENS, FinishReason.LENGTH)
        assert whole == (ANSWER[:-4] if stops == ["ENDE"] else ANSWER)
        for cut in range(1, len(tokens)):
            first, taken, context = await streamed(made, request, TOKENS[:cut], reason)
            assert context.code not in (None, StatusCode.OK)
            assert taken == TOKENS[:cut]
            assert whole.startswith(first)
            again = pb.GenerateRequest()
            again.CopyFrom(request)
            again.committed_token_ids.extend(taken)
            rest, more, _ = await streamed(made, again, TOKENS[cut:], FinishReason.LENGTH)
            assert (first + rest, taken + more) == (whole, tokens)


# --------------------------------------------------------------------------- what is counted

End = Callable[[GrpcApi, InFlightRequest, asyncio.Task[Any]], object]


def finished(reason: FinishReason) -> End:
    return lambda made, live, _call: ends(made, live, reason)


def refused(code: RejectCode) -> End:
    return lambda made, live, _call: pool_of(made).say(Reject(live.pool_id, code, "prompt", "no"))


ENDS: list[tuple[End, str]] = [
    (finished(FinishReason.STOP), "OK"),
    (finished(FinishReason.LENGTH), "OK"),
    (finished(FinishReason.DEADLINE), "DEADLINE_EXCEEDED"),
    (finished(FinishReason.FAILED), "INTERNAL"),
    *((refused(code), CODES[code].name) for code in RejectCode),
    (lambda made, _live, _call: session_of(made).cut_off("gone"), "UNAVAILABLE"),
    # The pool knows it as what the frontend has cancelled.
    (lambda made, live, _call: brings(made, live, TOKENS), "OK"),
    (lambda _made, _live, call: call.cancel(), "CANCELLED"),
]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("end", "status"), ENDS)
async def test_an_end_counts_with_the_status_that_the_client_got(
    end: End, status: str, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And makes place for another call of the same key."""
    monkeypatch.setattr("cluster.frontend.answer._USAGE_WAIT_S", 100.0)
    counted: list[str] = []

    def sink(name: str, _value: float, tags: Mapping[str, str]) -> None:
        if name == "lockstep_request_seconds":
            counted.append(tags["status"])

    key = f"Bearer {add(tmp_path / 'keys.yaml', 'alice', requests_max=1)}"
    auth = AuthConfig(keys_file=str(tmp_path / "keys.yaml"))
    config = CONFIG.model_copy(update={"auth": auth})
    async with frontend(replicas=0, sink=sink, config=config) as made:
        context, too_many = Context(key), Context(key)
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=len(TOKENS), stop=["says"])
        asking = stream(made, request, context) if streaming else made.Generate(request, context)
        call = asyncio.ensure_future(asking)
        live = await asked(made)
        await made.Generate(request, too_many)
        assert too_many.code is StatusCode.RESOURCE_EXHAUSTED
        assert int(too_many.trailing["retry-after"]) >= 1
        end(made, live, call)
        await asyncio.gather(call, return_exceptions=True)
        assert counted == [status]
        if call.cancelled():
            assert status == "CANCELLED"
        else:
            assert (context.code or StatusCode.OK).name == status
        await until(lambda: not unfinished(made.service))
        another = asyncio.ensure_future(made.Generate(request, Context(key)))
        await asked(made)
        another.cancel()
        await asyncio.gather(another, return_exceptions=True)


@pytest.mark.parametrize("reason", UNENDED)
def test_an_end_is_told_by_the_clients_name_for_its_request(reason: FinishReason) -> None:
    for request_id, of in (("mine", "request mine: "), ("", "")):
        told = refusal_of_finish(Finish("pool-1", reason, message="no"), request_id, "")
        assert told == Refusal(CODES[reason], f"{of}no")
        unsaid = refusal_of_finish(Finish("pool-1", reason), request_id, "")
        assert len(unsaid.message) > len(of)
        assert "pool-1" not in unsaid.message


# --------------------------------------------------------------------------- others' turns


async def test_many_tokens_become_text_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = (tokenizer().encode("so it goes, ").ids * 100)[:300]
    threads: list[threading.Thread] = []
    push = TextStream.push

    def noted(self: TextStream, part: list[int]) -> object:
        threads.append(threading.current_thread())
        return push(self, part)

    monkeypatch.setattr(TextStream, "push", noted)
    async with frontend(replicas=0) as made:
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=400)
        text, _, _ = await streamed(made, request, tokens, FinishReason.LENGTH)
    assert text == text_of(tokens)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
