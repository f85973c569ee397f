"""Arrivals have the rates asked for, a seed repeats them, and a wrong trace says where."""

from __future__ import annotations

from itertools import islice
from random import Random
from statistics import fmean, median

import pytest

from scheduler.simulation import (
    WorkloadRequest,
    bursts,
    drawn,
    lognormal,
    parse_acceptance,
    parse_lengths,
    poisson,
    read_trace,
    uniform,
)

MIX = ((0.9, 3.0), (0.4, 1.0))


def requests(seed: int) -> list[WorkloadRequest]:
    rng = Random(seed)
    return drawn(poisson(5, rng), 2000, uniform(3, 9), lognormal(50, 0.5), MIX, rng)


def test_a_seed_repeats_everything() -> None:
    assert requests(1) == requests(1) != requests(2)


def test_draws_are_distributed_as_asked() -> None:
    made = requests(3)
    assert made[-1].at_s == pytest.approx(2000 / 5, rel=0.1)
    assert {one.prompt_tokens for one in made} == set(range(3, 10))
    assert median(one.new_tokens for one in made) == pytest.approx(50, rel=0.1)
    assert fmean(one.acceptance == 0.9 for one in made) == pytest.approx(0.75, abs=0.05)
    assert [one.at_s for one in made] == sorted(one.at_s for one in made)
    assert {one.at_s for one in drawn(None, 3, uniform(1, 1), uniform(1, 1), MIX, Random(0))} == {0}


def test_between_bursts_no_request_comes() -> None:
    due = list(islice(bursts(10, 2.0, 3.0, Random(0)), 500))
    assert due == sorted(due)
    assert all(at % 5.0 <= 2.0 for at in due)
    assert due[-1] == pytest.approx(500 / 10 / 2 * 5, rel=0.2)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("7", uniform(7, 7)), ("3..9", uniform(3, 9)), ("lognormal:200:0.8", lognormal(200.0, 0.8))],
)
def test_lengths_are_read_and_cut(text: str, lengths: object) -> None:
    first, second = Random(0), Random(0)
    read = parse_lengths(text)
    assert [read(first) for _ in range(50)] == [lengths(second) for _ in range(50)]  # type: ignore[operator]
    assert max(lognormal(100, 3, most=120)(first) for _ in range(50)) == 120


@pytest.mark.parametrize(
    "text", ["", "0", "9..3", "x", "lognormal:0:1", "lognormal:5", "lognormal:5:-1"]
)
def test_wrong_lengths_say_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected N, N\.\.M or lognormal"):
        parse_lengths(text)


def test_acceptance_is_read() -> None:
    assert parse_acceptance("0.7") == [(0.7, 1.0)]
    assert parse_acceptance("0.9:3,0.4:1") == list(MIX)


@pytest.mark.parametrize("text", ["", "1.1", "-0.1", "0.5:0", "a:b", "0.5,", "0.5:inf"])
def test_a_wrong_acceptance_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_acceptance(text)


def test_a_trace_is_read_by_time() -> None:
    lines = [
        '{"at_s": 2, "prompt_tokens": 5, "new_tokens": 6, "acceptance": 0.1}',
        "",
        '{"at_s": 0.5, "prompt_tokens": 7, "new_tokens": 8}',
    ]
    read = read_trace(lines, ((0.3, 1.0),), Random(0))
    assert read == [WorkloadRequest(0.5, 7, 8, 0.3), WorkloadRequest(2.0, 5, 6, 0.1)]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "line 2: Invalid JSON"),
        ("[]", "line 2: Input should be an object"),
        ('{"prompt_tokens": 5, "new_tokens": 6}', "line 2: at_s"),
        ('{"at_s": 1, "prompt_tokens": 0, "new_tokens": 6}', "line 2: prompt_tokens"),
        ('{"at_s": 1, "prompt_tokens": 5, "new_tokens": "6"}', "line 2: new_tokens"),
        ('{"at_s": 1, "prompt_tokens": 5, "new_tokens": 6, "acceptance": 2}', "line 2: acceptance"),
        ('{"at_s": 1, "prompt_tokens": Infinity, "new_tokens": 6}', "line 2: prompt_tokens"),
        ('{"at_s": 1, "prompt_tokens": NaN, "new_tokens": 6}', "line 2: prompt_tokens"),
        ('{"at_s": 1, "prompt_tokens": 5, "new_tokens": 1' + "0" * 400 + "}", "line 2: new_tokens"),
        ('{"at_s": Infinity, "prompt_tokens": 5, "new_tokens": 6}', "line 2: at_s"),
        ('{"at_s": NaN, "prompt_tokens": 5, "new_tokens": 6}', "line 2: at_s"),
        ('{"at_s": true, "prompt_tokens": 5, "new_tokens": 6}', "line 2: at_s"),
    ],
)
def test_a_wrong_trace_names_line_and_field(line: str, wrong: str) -> None:
    good = '{"at_s": 0.5, "prompt_tokens": 7, "new_tokens": 8}'
    with pytest.raises(ValueError, match=wrong):
        read_trace([good, line], MIX, Random(0))
    with pytest.raises(ValueError, match="no requests"):
        read_trace([], MIX, Random(0))
