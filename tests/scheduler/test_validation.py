"""Proves that a request that can never be served as asked is refused, and which field is named."""

from __future__ import annotations

import math

import pytest

from scheduler.config import SchedulerConfig
from scheduler.errors import InvalidRequest
from scheduler.messages import ReplicaSpec, Request, SamplingParams
from scheduler.validation import END_TOKENS_MAX, check_request

SPEC = ReplicaSpec(kv_blocks=10, block_size=4, context_len=64, vocab_size=100)
CONFIG = SchedulerConfig(prompt_tokens_max=50, stop_token_ids_max=3, timeout_s_max=60)


def request(**fields: object) -> Request:
    return Request(**{"id": "a", "prompt": (1, 2, 3), "max_new_tokens": 8, **fields})


GOOD: list[dict[str, object]] = [
    {},
    {"prompt": (0,)},
    {"prompt": (99,)},
    {"max_new_tokens": 1},
    {"max_new_tokens": 37},  # 40 tokens fill the 10 blocks exactly
    {"stop_token_ids": (1, 2, 3)},
    {"stop_token_ids": tuple(range(3 + END_TOKENS_MAX))},
    {"draft_len": 0},
    {"draft_len": 32},
    {"timeout_s": 0.001},
    {"timeout_s": 60},
    {"committed": (1, 2)},
    {"sampling": SamplingParams(1e-6, 1, 1e-6, 0.0, 0)},
    {"sampling": SamplingParams(5.0, 10**6, 1.0, 1.0, 2**63 - 1)},
]


@pytest.mark.parametrize("fields", GOOD)
def test_good_requests_pass(fields: dict[str, object]) -> None:
    check_request(request(**fields), CONFIG, SPEC)


BAD: list[tuple[str, dict[str, object]]] = [
    ("id", {"id": ""}),
    ("prompt", {"prompt": ()}),
    ("prompt", {"prompt": (1,) * 51}),
    ("prompt", {"prompt": (1, 100)}),
    ("prompt", {"prompt": (-1, 1)}),
    ("max_new_tokens", {"max_new_tokens": 0}),
    ("max_new_tokens", {"max_new_tokens": -5}),
    ("max_new_tokens", {"max_new_tokens": 62}),  # beyond the context
    ("max_new_tokens", {"max_new_tokens": 38}),  # beyond the blocks of an empty replica
    ("committed", {"committed": (1,) * 9}),
    ("committed", {"committed": (100,)}),
    ("stop_token_ids", {"stop_token_ids": tuple(range(3 + END_TOKENS_MAX + 1))}),
    ("stop_token_ids", {"stop_token_ids": (100,)}),
    ("draft_len", {"draft_len": -1}),
    ("draft_len", {"draft_len": 33}),
    ("timeout_s", {"timeout_s": 0}),
    ("timeout_s", {"timeout_s": -1.0}),
    ("timeout_s", {"timeout_s": math.nan}),
    ("timeout_s", {"timeout_s": math.inf}),
    ("timeout_s", {"timeout_s": 60.1}),
    ("temperature", {"sampling": SamplingParams(temperature=-0.1)}),
    ("temperature", {"sampling": SamplingParams(temperature=math.nan)}),
    ("temperature", {"sampling": SamplingParams(temperature=math.inf)}),
    ("temperature", {"sampling": SamplingParams(temperature=1e39)}),
    ("top_k", {"sampling": SamplingParams(top_k=-1)}),
    ("top_k", {"sampling": SamplingParams(top_k=2**31)}),
    ("top_p", {"sampling": SamplingParams(top_p=0.0)}),
    ("top_p", {"sampling": SamplingParams(top_p=1.01)}),
    ("top_p", {"sampling": SamplingParams(top_p=math.nan)}),
    ("min_p", {"sampling": SamplingParams(min_p=-0.1)}),
    ("min_p", {"sampling": SamplingParams(min_p=1.1)}),
    ("min_p", {"sampling": SamplingParams(min_p=math.nan)}),
    ("seed", {"sampling": SamplingParams(seed=-1)}),
    ("seed", {"sampling": SamplingParams(seed=2**63)}),
]


@pytest.mark.parametrize(("field", "fields"), BAD)
def test_bad_requests_are_refused_by_field(field: str, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(request(**fields), CONFIG, SPEC)
    assert caught.value.field == field
    assert caught.value.reason


def test_without_a_spec_only_what_depends_on_it_goes_unchecked() -> None:
    check_request(request(prompt=(10**6,), max_new_tokens=10**6), CONFIG)
    with pytest.raises(InvalidRequest):
        check_request(request(prompt=()), CONFIG)


def test_ids_that_only_pad_the_embedding_may_come_back_but_not_be_asked_for() -> None:
    padded = ReplicaSpec(
        kv_blocks=10, block_size=4, context_len=64, vocab_size=100, embedding_size=128
    )
    check_request(request(committed=(100, 127)), CONFIG, padded)
    for field, value in (("committed", (128,)), ("prompt", (100,)), ("stop_token_ids", (100,))):
        with pytest.raises(InvalidRequest) as caught:
            check_request(request(**{field: value}), CONFIG, padded)
        assert caught.value.field == field
