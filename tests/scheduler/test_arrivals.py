"""Arrivals have the rates asked for, a seed repeats them, and a wrong trace says where."""

from __future__ import annotations

from itertools import islice
from random import Random
from statistics import fmean, median

import pytest

from scheduler.arrivals import (
    Ask,
    LogNormal,
    Seen,
    TraceError,
    Uniform,
    at_once,
    bursts,
    drawn,
    parse_acceptance,
    parse_lengths,
    poisson,
    read_trace,
)

MIX = ((0.9, 3.0), (0.4, 1.0))


def asks(seed: int) -> list[Ask]:
    rng = Random(seed)
    return list(drawn(poisson(5, rng), 2000, Uniform(3, 9), LogNormal(50, 0.5), MIX, rng))


def test_a_seed_repeats_everything() -> None:
    assert asks(1) == asks(1)
    assert asks(1) != asks(2)


def test_draws_are_distributed_as_asked() -> None:
    made = asks(3)
    assert made[-1].at_s == pytest.approx(2000 / 5, rel=0.1)
    assert {ask.prompt_tokens for ask in made} == set(range(3, 10))
    assert median(ask.new_tokens for ask in made) == pytest.approx(50, rel=0.1)
    assert fmean(ask.acceptance == 0.9 for ask in made) == pytest.approx(0.75, abs=0.05)
    assert [ask.at_s for ask in made] == sorted(ask.at_s for ask in made)


def test_between_bursts_nobody_comes() -> None:
    due = list(islice(bursts(10, 2.0, 3.0, Random(0)), 500))
    assert due == sorted(due)
    assert all(at % 5.0 <= 2.0 for at in due)
    assert due[-1] == pytest.approx(500 / 10 / 2 * 5, rel=0.2)


def test_at_once_means_now() -> None:
    assert list(islice(at_once(), 3)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("7", Uniform(7, 7)),
        ("3..9", Uniform(3, 9)),
        ("lognormal:200:0.8", LogNormal(200.0, 0.8)),
    ],
)
def test_lengths_are_read(text: str, lengths: object) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize(
    "text", ["", "0", "9..3", "x", "lognormal:0:1", "lognormal:5", "lognormal:5:-1"]
)
def test_wrong_lengths_say_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected N, N\.\.M or lognormal"):
        parse_lengths(text)


def test_seen_lengths_are_drawn_and_a_cut_holds() -> None:
    rng = Random(0)
    assert {Seen([4, 8]).draw(rng) for _ in range(50)} == {4, 8}
    assert max(LogNormal(100, 3, most=120).draw(rng) for _ in range(50)) == 120


@pytest.mark.parametrize(("text", "mix"), [("0.7", ((0.7, 1.0),)), ("0.9:3,0.4:1", MIX)])
def test_acceptance_is_read(text: str, mix: object) -> None:
    assert parse_acceptance(text) == mix


@pytest.mark.parametrize("text", ["", "1.1", "-0.1", "0.5:0", "a:b", "0.5,"])
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
    assert read == [Ask(0.5, 7, 8, 0.3), Ask(2.0, 5, 6, 0.1)]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: expected an object"),
        ('{"prompt_tokens": 5, "new_tokens": 6}', "line 2: at_s"),
        ('{"at_s": 1, "prompt_tokens": 0, "new_tokens": 6}', "line 2: prompt_tokens"),
        ('{"at_s": 1, "prompt_tokens": 5, "new_tokens": "6"}', "line 2: new_tokens"),
        ('{"at_s": 1, "prompt_tokens": 5, "new_tokens": 6, "acceptance": 2}', "line 2: acceptance"),
        ('{"at_s": 1, "prompt_tokens": Infinity, "new_tokens": 6}', "line 2: prompt_tokens"),
        ('{"at_s": 1, "prompt_tokens": NaN, "new_tokens": 6}', "line 2: prompt_tokens"),
        ('{"at_s": 1, "prompt_tokens": 5, "new_tokens": 1' + "0" * 400 + "}", "line 2: new_tokens"),
        ('{"at_s": Infinity, "prompt_tokens": 5, "new_tokens": 6}', "line 2: at_s"),
        ('{"at_s": true, "prompt_tokens": 5, "new_tokens": 6}', "line 2: at_s"),
    ],
)
def test_a_wrong_trace_names_line_and_field(line: str, wrong: str) -> None:
    good = '{"at_s": 0.5, "prompt_tokens": 7, "new_tokens": 8}'
    with pytest.raises(TraceError, match=wrong):
        read_trace([good, line], MIX, Random(0))
    with pytest.raises(TraceError, match="no requests"):
        read_trace([], MIX, Random(0))
