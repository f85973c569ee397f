"""Proves: the audit decodes finished requests again, alone and without drafts, while nothing else
runs; it says where an output is not the target's, and gives way to clients and to a stop.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster.config_sources import from_args
from cluster.frontend.grpc_api.api import GrpcApi
from protos import lockstep_pb2 as pb
from scheduler.messages import Batch, BatchKind, StepResult
from tests.cluster.fakes import VOCAB, FakeReplica
from tests.cluster.frontend.rig import PROMPT, Context, frontend, pool_of, unfinished
from tests.cluster.wire import until

CONFIG = from_args(
    {
        "audit": {"share": 1.0},
        "frontend": {"coalesce_ms": 1},
        "scheduler": {"draft_len": 3, "steps_per_batch_max": 1},
    }
)
REQUESTS = 6
NEW_TOKENS = 40


class Watched(FakeReplica):
    """Notes its step batches. With drafts it says a wrong token, once, where it is to lie."""

    def __init__(self, lies: bool = False, step_s: float = 0.0) -> None:
        super().__init__(step_s)
        self.steps: list[Batch] = []
        self._lies = lies

    def step(self, batch: Batch, interrupted: Callable[[], bool] = lambda: False) -> StepResult:
        result = super().step(batch, interrupted)
        if batch.kind is BatchKind.PREFILL:
            return result
        self.steps.append(batch)
        row = result.rows[0]
        if self._lies and len(self.steps) > 4 and batch.draft_len and row.tokens:
            self._lies = False
            wrong = 2 + (row.tokens[-1] - 1) % (VOCAB - 2)
            self._residents[row.sequence_id].content[-1] = wrong
            row = replace(row, tokens=(*row.tokens[:-1], wrong))
        return replace(result, rows=(row, *result.rows[1:]))


class Counts(Counter[str]):
    def __call__(self, name: str, value: float, _tags: Mapping[str, str]) -> None:
        self[name.removeprefix("lockstep_")] += int(value)


async def ask(made: GrpcApi, number: int) -> None:
    request = pb.GenerateRequest(
        prompt=PROMPT, max_new_tokens=NEW_TOKENS, temperature=0, request_id=f"ask-{number}"
    )
    context = Context()
    await made.Generate(request, context)
    assert context.code is None, context.details


def served(replica: FakeReplica, counts: Counts) -> Any:
    return frontend(config=CONFIG, load=lambda: replica, sink=counts)


async def test_every_token_of_its_share_is_compared_alone_and_without_drafts() -> None:
    counts, replica = Counts(), Watched()
    async with served(replica, counts) as made:
        await asyncio.gather(*(ask(made, number) for number in range(REQUESTS)))
        begun = len(replica.steps)
        await until(lambda: counts["audited_requests"] == REQUESTS)
        await until(lambda: not unfinished(made.service))
    assert counts["audited_tokens"] == REQUESTS * NEW_TOKENS
    assert counts["audit_mismatches"] == 0
    assert any(batch.draft_len for batch in replica.steps[:begun])
    audits = replica.steps[begun:]
    assert {(len(batch.rows), batch.draft_len) for batch in audits} == {(1, 0)}


async def test_a_wrong_token_is_found_and_its_place_told(caplog: pytest.LogCaptureFixture) -> None:
    counts = Counts()
    with caplog.at_level(logging.ERROR, "lockstep.audit"):
        async with served(Watched(lies=True), counts) as made:
            await ask(made, 0)
            await ask(made, 1)
            await until(lambda: counts["audited_requests"] == 2)
    assert counts["audit_mismatches"] == 1
    [said] = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"audit: request id='ask-0' differs at new token \d+", said)


async def test_a_client_does_not_wait_for_an_audit() -> None:
    counts, replica = Counts(), Watched(step_s=0.02)
    async with served(replica, counts) as made:
        await ask(made, 0)
        await until(lambda: unfinished(made.service) == 1)
        await asyncio.gather(*(ask(made, number) for number in range(1, 4)))
        # The one in hand has been ended, and none ended before the clients had their answers.
        assert counts["audited_requests"] == 0
        await until(lambda: counts["audited_requests"] == 4)
    assert counts["audit_mismatches"] == 0


async def test_a_stop_does_not_wait_for_an_audit() -> None:
    counts, replica = Counts(), Watched(step_s=0.05)
    async with served(replica, counts) as made:
        await ask(made, 0)
        await until(lambda: unfinished(made.service) == 1)
        await pool_of(made).actor.stop_admitting(100.0)
        await until(lambda: not unfinished(made.service))
    assert counts["audited_requests"] == 0


async def test_without_a_share_nothing_is_decoded_again() -> None:
    counts, replica = Counts(), Watched()
    async with frontend(load=lambda: replica, sink=counts) as made:
        await ask(made, 0)
        made.service.audit.check()
        assert made.service.audit.waiting == 0
