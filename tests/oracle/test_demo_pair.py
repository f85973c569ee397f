"""The oracle on the embedded pair: real weights, real text, the same comparison token for token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.local_engine import LocalEngine
from replicas.config import ReplicaConfig
from replicas.models.load import resolve
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from tests.oracle.worlds import run_staggered, sampled
from tests.reference import plain_greedy

TEXTS = (
    "The",
    "The for statement is used to iterate over the elements of a sequence",
    "Return a new list containing",
    "class Thread:\n    This class represents an activity that is run in a separate thread",
    "If the argument is",
    "Raises ValueError when",
    "An example:\n\n>>> import os\n>>> os.path.join(",
    "Note that the module must be imported before the function is called, and that it is an error",
    "Deprecated since version 3.",
    "zip",
)
NEW = (1, 20, 33, 8)


@cache
def replica() -> Replica:
    return Replica.load(ReplicaConfig(device="cpu", kv_blocks=1024))


@cache
def requests() -> tuple[Request, ...]:
    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    return tuple(
        Request(f"r{i}", tuple(tokenizer(text).input_ids), NEW[i % len(NEW)])
        for i, text in enumerate(TEXTS * 2)
    )


@cache
def greedy_reference() -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(resolve("tiny")).eval()
    return [plain_greedy(model, r.prompt, r.max_new_tokens) for r in requests()]


@cache
def sampled_reference() -> list[list[int]]:
    engine = LocalEngine(replica(), SchedulerConfig(rows_max=1, draft_len=0))
    return [output.tokens for output in engine.generate(sampled(requests()))]


@pytest.mark.parametrize(
    ("rows_max", "draft_len"), [(1, 5), (3, 0), (3, 8), (8, 3), (8, None), (16, 1), (16, 5)]
)
def test_greedy_output_equals_plain_generate(rows_max: int, draft_len: int | None) -> None:
    outputs = run_staggered(replica(), requests(), rows_max, draft_len, seed=rows_max)
    assert [output.tokens for output in outputs] == greedy_reference()
    if draft_len:
        drafted = sum(output.usage.draft_tokens for output in outputs)
        accepted = sum(output.usage.accepted_tokens for output in outputs)
        assert 0.3 < accepted / drafted < 1.0


@pytest.mark.parametrize(("rows_max", "draft_len"), [(3, 8), (8, None), (16, 4)])
def test_sampled_output_depends_on_the_request_alone(rows_max: int, draft_len: int | None) -> None:
    outputs = run_staggered(
        replica(), sampled(requests()), rows_max, draft_len, seed=draft_len or 0
    )
    assert [output.tokens for output in outputs] == sampled_reference()


def test_a_request_without_speculation_rides_along_with_others_that_have_it() -> None:
    mixed = [replace(r, draft_len=(None, 0, 2)[i % 3]) for i, r in enumerate(requests())]
    outputs = run_staggered(replica(), mixed, 8, 5)
    assert [output.tokens for output in outputs] == greedy_reference()
    for request, output in zip(mixed, outputs, strict=True):
        if request.draft_len == 0:
            assert output.usage.draft_tokens == 0
