"""Which requests come and when, drawn from a seed or read from a trace.

Pure: files are read elsewhere, their lines come in here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Lengths = Callable[[Random], int]
"""Draws a length in tokens, at least 1."""

AcceptanceMix = Sequence[tuple[float, float]]
"""Acceptances and the share of the requests that have each."""

_MOST = 1e15
"""Of any number in a trace; a float holds all whole ones up to it."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload."""

    at_s: float
    """When it comes; in a closed loop it comes when another has ended."""
    prompt_tokens: int
    new_tokens: int
    acceptance: float
    """Probability that a draft token of it is accepted if those before it were."""


def uniform(least: int, most: int) -> Lengths:
    """From `least` to `most`, each as likely."""
    return lambda rng: rng.randint(least, most)


def lognormal(median: float, sigma: float, most: int = 8192) -> Lengths:
    """Half of them below `median`; `sigma` is the deviation of the logarithm. Cut at `most`."""
    mu = math.log(median)
    return lambda rng: min(max(round(rng.lognormvariate(mu, sigma)), 1), most)


def parse_lengths(text: str) -> Lengths:
    """ "200", "16..256" or "lognormal:200:0.8". Raises ValueError, which says what was expected."""
    try:
        if text.startswith("lognormal:"):
            median, sigma = (float(part) for part in text.split(":")[1:])
            if median >= 1 and sigma >= 0:
                return lognormal(median, sigma)
        else:
            first, _, last = text.partition("..")
            least, most = int(first), int(last or first)
            if 1 <= least <= most:
                return uniform(least, most)
    except ValueError:
        pass
    raise ValueError(f"expected N, N..M or lognormal:MEDIAN:SIGMA tokens, got {text!r}")


def parse_acceptance(text: str) -> AcceptanceMix:
    """ "0.7", or "0.9:3,0.4:1": values and their shares. Raises ValueError."""
    mix = []
    for part in text.split(","):
        value, _, share = part.partition(":")
        try:
            mix.append((float(value), float(share or 1)))
        except ValueError:
            raise ValueError(f"expected A or A:SHARE,A:SHARE, got {text!r}") from None
    if any(not 0 <= value <= 1 or not 0 < share < math.inf for value, share in mix):
        raise ValueError(f"expected acceptances in [0, 1] and shares above 0, got {text!r}")
    return mix


def poisson(rate_per_s: float, rng: Random) -> Iterator[float]:
    """Independent arrivals, `rate_per_s` on average; without end."""
    now_s = 0.0
    while True:
        now_s += rng.expovariate(rate_per_s)
        yield now_s


def bursts(rate_per_s: float, on_s: float, off_s: float, rng: Random) -> Iterator[float]:
    """Poisson at `rate_per_s` for `on_s` seconds, then none for `off_s`, and again."""
    for on in poisson(rate_per_s, rng):
        yield on + int(on / on_s) * off_s


def drawn(
    arrivals: Iterator[float] | None,
    count: int,
    prompts: Lengths,
    new: Lengths,
    acceptance: AcceptanceMix,
    rng: Random,
) -> list[WorkloadRequest]:
    """`count` requests that come at these times. None: all at once."""
    requests = []
    for _ in range(count):
        at_s = 0.0 if arrivals is None else next(arrivals)
        accepted = _draw(acceptance, rng)
        requests.append(WorkloadRequest(at_s, prompts(rng), new(rng), accepted))
    return requests


def _draw(acceptance: AcceptanceMix, rng: Random) -> float:
    values, shares = zip(*acceptance, strict=True)
    (value,) = rng.choices(values, shares)
    return float(value)


class TraceError(ValueError):
    """A trace that cannot be used; the message names the line and the field."""


class _TraceLine(BaseModel):
    model_config = ConfigDict(strict=True)

    at_s: float = Field(ge=0, le=_MOST)
    prompt_tokens: int = Field(ge=1, le=_MOST)
    new_tokens: int = Field(ge=1, le=_MOST)
    acceptance: float | None = Field(default=None, ge=0, le=1)


def read_trace(
    lines: Iterable[str], acceptance: AcceptanceMix, rng: Random
) -> list[WorkloadRequest]:
    """Requests of JSON lines with `at_s`, `prompt_tokens`, `new_tokens` and maybe `acceptance`.

    By time, whatever the order of the lines. Raises TraceError.
    """
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            read = _TraceLine.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ": ".join(["", *map(str, first["loc"])])
            raise TraceError(f"line {number}{where}: {first['msg']}") from None
        accepted = _draw(acceptance, rng)
        if read.acceptance is not None:
            accepted = read.acceptance
        requests.append(WorkloadRequest(read.at_s, read.prompt_tokens, read.new_tokens, accepted))
    if not requests:
        raise TraceError("no requests")
    return sorted(requests, key=lambda request: request.at_s)
