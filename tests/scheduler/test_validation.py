"""Proves that a request that can never be served as asked is refused, and which field is named."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from scheduler.config import SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.errors import InvalidRequest
from scheduler.messages import ReplicaSpec, Request, Sampling
from scheduler.validation import (
    BIAS_MAX,
    END_TOKENS_MAX,
    LOGIT_BIAS_MAX,
    PENALTY_MAX,
    check_request,
)

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
    {"committed": (1,) * 8},
    {"sampling": Sampling(1e-6, 1, 1e-6, 0.0, 0)},
    {"sampling": Sampling(5.0, 2**31 - 1, 1.0, 1.0, 2**63 - 1)},
]


@pytest.mark.parametrize("fields", GOOD)
def test_good_requests_pass(fields: dict[str, object]) -> None:
    check_request(request(**fields), CONFIG, SPEC)


BAD: dict[str, tuple[object, ...]] = {
    "id": ("",),
    "prompt": ((), (1,) * 51, (1, 100), (-1, 1)),
    # The last two are beyond the context, and beyond the blocks of an empty replica.
    "max_new_tokens": (0, -5, 62, 38),
    "committed": ((1,) * 9, (100,)),
    "stop_token_ids": (tuple(range(3 + END_TOKENS_MAX + 1)), (100,)),
    "draft_len": (-1, 33),
    "timeout_s": (0, -1.0, math.nan, math.inf, 60.1),
}
BAD_SAMPLING: dict[str, tuple[float, ...]] = {
    "temperature": (-0.1, math.nan, math.inf, 1e39),
    "top_k": (-1, 2**31),
    "top_p": (0.0, 1.01, math.nan),
    "min_p": (-0.1, 1.1, math.nan),
    "seed": (-1, 2**63),
}


GOOD_DECODING: list[dict[str, object]] = [
    {"frequency_penalty": PENALTY_MAX, "presence_penalty": -PENALTY_MAX},
    {"repetition_penalty": 1e-9},
    {"logit_bias": ((0, BIAS_MAX), (99, -BIAS_MAX))},
    {"logit_bias": ((1, 1.0),) * LOGIT_BIAS_MAX},
    {"logprobs": 0, "prompt_logprobs": 20},
    {"logprobs": 20, "prompt_logprobs": 0},
    {"min_tokens": 8},
    {"min_tokens": 8, "bad_words": ((0, 99), (5,))},
    {"grammar": "start: /a/"},
    {"allowed_token_ids": (0, 99), "min_tokens": 8},
    {"logprobs": 0, "logprob_token_ids": (0, 99)},
    {"logprobs": 0, "logprob_token_ids": (1,) * 128},
]


@pytest.mark.parametrize("fields", GOOD_DECODING, ids=lambda fields: ",".join(fields))
def test_good_changes_of_logits_pass(fields: dict[str, object]) -> None:
    check_request(request(decoding=Decoding(3, **fields)), CONFIG, SPEC)


BAD_DECODING: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (PENALTY_MAX + 0.1, -PENALTY_MAX - 0.1, math.nan),
    "presence_penalty": (PENALTY_MAX + 0.1, -PENALTY_MAX - 0.1, math.nan),
    "repetition_penalty": (0.0, -1.0, math.inf, math.nan),
    "logit_bias": (
        ((1, 1.0),) * (LOGIT_BIAS_MAX + 1),
        ((1, BIAS_MAX + 1),),
        ((1, -BIAS_MAX - 1),),
        ((1, math.nan),),
        ((100, 1.0),),
        ((-1, 1.0),),
    ),
    "logprobs": (-2, -1, 21),
    "prompt_logprobs": (-2, -1, 21),
    "min_tokens": (-1, 9),
    "bad_words": (((1, 100),), ((-1,),)),
    "allowed_token_ids": ((1, 100), (-1,)),
    "logprob_token_ids": ((1,),),
}
BAD_TOGETHER: list[tuple[str, dict[str, object]]] = [
    ("min_tokens", {"grammar": "start: /a/", "min_tokens": 1}),
    ("bad_words", {"grammar": "start: /a/", "bad_words": ((1,),)}),
    ("allowed_token_ids", {"grammar": "start: /a/", "allowed_token_ids": (1,)}),
    ("allowed_token_ids", {"bad_words": ((1,),), "allowed_token_ids": (1,)}),
    ("logprob_token_ids", {"logprobs": 0, "logprob_token_ids": (100,)}),
    ("logprob_token_ids", {"logprobs": 0, "logprob_token_ids": (1,) * 129}),
]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        *((field, {field: value}) for field, values in BAD.items() for value in values),
        *(
            (field, {"decoding": Decoding(3, **{field: value})})
            for field, values in BAD_DECODING.items()
            for value in values
        ),
        *((field, {"decoding": Decoding(3, **fields)}) for field, fields in BAD_TOGETHER),
        *(
            (field, {"sampling": Sampling(**{field: value})})
            for field, values in BAD_SAMPLING.items()
            for value in values
        ),
    ],
)
def test_bad_requests_are_refused_by_field(field: str, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(request(**fields), CONFIG, SPEC)
    assert caught.value.field == field
    assert caught.value.reason


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("most", "spec", "good", "bad"),
    [
        (0, SPEC, (0,), (-1, 1)),
        (5, None, (0, 5), (-2, -1, 6)),
        (99, SPEC, (99,), (-1, 100)),
        (100, SPEC, (-1, 100), (-2, 101)),
        (100, None, (100,), (-1,)),
        (-1, SPEC, (-1, 0, 100, 5000), (-2,)),
        (-1, None, (-1, 5000), (-2,)),
    ],
)
def test_the_setting_says_how_many_log_probabilities_and_whether_all_may_be_asked_for(
    field: str, most: int, spec: ReplicaSpec | None, good: Sequence[int], bad: Sequence[int]
) -> None:
    """-1 asks for a vocabulary of 100."""
    config = CONFIG.model_copy(update={"max_logprobs": most})
    for count in good:
        check_request(request(decoding=Decoding(3, **{field: count})), config, spec)
    for count in bad:
        with pytest.raises(InvalidRequest, match=rf"must be .*, is {count}") as caught:
            check_request(request(decoding=Decoding(3, **{field: count})), config, spec)
        assert caught.value.field == field
        assert most == -1 or f"[0, {most}]" in caught.value.reason


def test_of_the_allowed_tokens_one_must_go_on_where_the_text_may_not_end_yet() -> None:
    stops = request(stop_token_ids=(5, 6), decoding=Decoding(3, allowed_token_ids=(5, 6)))
    check_request(stops, CONFIG, SPEC)
    for allowed, least, good in (((5, 7), 1, True), ((5,), 1, False), ((5, 6), 1, False)):
        decoding = Decoding(3, allowed_token_ids=allowed, min_tokens=least)
        ask = request(stop_token_ids=(5, 6), decoding=decoding)
        if good:
            check_request(ask, CONFIG, SPEC)
        else:
            with pytest.raises(InvalidRequest, match=r"^allowed_token_ids: all of them end"):
                check_request(ask, CONFIG, SPEC)


def test_a_prompt_may_be_as_long_as_the_setting_says() -> None:
    check_request(request(prompt=(1,) * 50), CONFIG)
    with pytest.raises(InvalidRequest, match=r"^prompt: 51 tokens, at most 50 allowed"):
        check_request(request(prompt=(1,) * 51), CONFIG)


def test_without_a_spec_only_what_depends_on_it_goes_unchecked() -> None:
    check_request(request(prompt=(10**6,), max_new_tokens=10**6), CONFIG)
    with pytest.raises(InvalidRequest):
        check_request(request(prompt=()), CONFIG)


def test_ids_that_only_pad_the_embedding_may_come_back_but_not_be_asked_for() -> None:
    padded = ReplicaSpec(
        kv_blocks=10, block_size=4, context_len=64, vocab_size=100, embedding_size=128
    )
    check_request(request(committed=(100, 127)), CONFIG, padded)
    for field, value in (("committed", (0, 128)), ("prompt", (0, 100)), ("stop_token_ids", (100,))):
        with pytest.raises(InvalidRequest, match=f"^{field}: token id {value[-1]} is out of voc"):
            check_request(request(**{field: value}), CONFIG, padded)
    with pytest.raises(InvalidRequest, match=r"^bad_words: token id 128 is out of vocabulary"):
        check_request(request(decoding=Decoding(1, bad_words=((5, 128),))), CONFIG, padded)


@pytest.mark.parametrize(("context_len", "kv_blocks"), [(40, 99), (99, 10)])
def test_a_request_may_fill_a_replica_to_the_last_position(
    context_len: int, kv_blocks: int
) -> None:
    spec = ReplicaSpec(kv_blocks, block_size=4, context_len=context_len, vocab_size=100)
    assert spec.length_max == 40
    check_request(request(max_new_tokens=37), CONFIG, spec)
    with pytest.raises(InvalidRequest, match=r"^max_new_tokens: .*exceed the 40 tokens"):
        check_request(request(max_new_tokens=38), CONFIG, spec)
