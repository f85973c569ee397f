"""Who asks for what and when, drawn from a seed: arrivals, lengths, acceptance, or a trace.

Pure: files are read elsewhere, their lines come in here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

_NUMBER_MOST = 1e15
"""Of any number in a trace; a float holds all whole ones up to it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a study."""

    at_s: float
    """When it comes; in a closed loop it comes when another has ended."""
    prompt_tokens: int
    new_tokens: int
    acceptance: float
    """Probability that a draft token of it is accepted, if those before it were."""


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, rng: Random) -> int:
        """At least 1."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """From `least` to `most`, each as likely."""

    least: int
    most: int

    def draw(self, rng: Random) -> int:
        return rng.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Half of them below `median`; `sigma` is the deviation of the logarithm. Cut at `most`."""

    median: float
    sigma: float
    most: int = 8192

    def draw(self, rng: Random) -> int:
        return min(max(round(rng.lognormvariate(math.log(self.median), self.sigma)), 1), self.most)


@dataclass(frozen=True, slots=True)
class Seen:
    """Lengths that were seen, each as likely."""

    lengths: Sequence[int]

    def draw(self, rng: Random) -> int:
        return rng.choice(self.lengths)


def parse_lengths(text: str) -> Lengths:
    """ "200", "16..256" or "lognormal:200:0.8". Raises ValueError, which says what was expected."""
    try:
        if text.startswith("lognormal:"):
            _, median, sigma = text.split(":")
            drawn = LogNormal(float(median), float(sigma))
            if drawn.median < 1 or drawn.sigma < 0:
                raise ValueError
            return drawn
        least, _, most = text.partition("..")
        span = Uniform(int(least), int(most or least))
        if not 1 <= span.least <= span.most:
            raise ValueError
        return span
    except ValueError:
        raise ValueError(
            f"expected N, N..M or lognormal:MEDIAN:SIGMA tokens, got {text!r}"
        ) from None


def parse_acceptance(text: str) -> tuple[tuple[float, float], ...]:
    """ "0.7", or "0.9:3,0.4:1": values and their shares. Raises ValueError."""
    mix = []
    for part in text.split(","):
        value, _, share = part.partition(":")
        try:
            mix.append((float(value), float(share or 1)))
        except ValueError:
            raise ValueError(f"expected A or A:SHARE,A:SHARE, got {text!r}") from None
    if any(not 0 <= value <= 1 or share <= 0 for value, share in mix):
        raise ValueError(f"expected acceptances in [0, 1] and shares above 0, got {text!r}")
    return tuple(mix)


def poisson(rate_per_s: float, rng: Random) -> Iterator[float]:
    """Independent arrivals, `rate_per_s` on average; without end."""
    now_s = 0.0
    while True:
        now_s += rng.expovariate(rate_per_s)
        yield now_s


def bursts(rate_per_s: float, on_s: float, off_s: float, rng: Random) -> Iterator[float]:
    """Poisson at `rate_per_s` for `on_s` seconds, then nobody for `off_s`, and again."""
    for on in poisson(rate_per_s, rng):
        yield on + int(on / on_s) * off_s


def at_once() -> Iterator[float]:
    """All there from the beginning."""
    while True:
        yield 0.0


def drawn(
    arrivals: Iterable[float],
    count: int,
    prompts: Lengths,
    new: Lengths,
    acceptance: Sequence[tuple[float, float]],
    rng: Random,
) -> Iterator[Ask]:
    """`count` requests that come at these times. `acceptance`: values and their shares."""
    values = [value for value, _ in acceptance]
    shares = [share for _, share in acceptance]
    for at_s, _ in zip(arrivals, range(count), strict=False):
        (value,) = rng.choices(values, shares)
        yield Ask(at_s, prompts.draw(rng), new.draw(rng), value)


class TraceError(ValueError):
    """A trace that cannot be used; the message names the line and the field."""


def read_trace(
    lines: Iterable[str], acceptance: Sequence[tuple[float, float]], rng: Random
) -> list[Ask]:
    """Requests of JSON lines with `at_s`, `prompt_tokens`, `new_tokens` and maybe `acceptance`.

    By time, whatever the order of the lines. Raises TraceError.
    """
    values = [value for value, _ in acceptance]
    shares = [share for _, share in acceptance]
    asks = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        (value,) = rng.choices(values, shares)
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"line {number}: not JSON: {error.msg}") from None
        if not isinstance(data, dict):
            raise TraceError(f"line {number}: expected an object")
        asks.append(
            Ask(
                _number(data, "at_s", number, least=0.0),
                int(_number(data, "prompt_tokens", number, least=1)),
                int(_number(data, "new_tokens", number, least=1)),
                _number({"acceptance": value, **data}, "acceptance", number, least=0, most=1),
            )
        )
    if not asks:
        raise TraceError("no requests")
    return sorted(asks, key=lambda ask: ask.at_s)


def _number(
    data: dict[str, object], field: str, line: int, least: float, most: float = math.inf
) -> float:
    value = data.get(field)
    # JSON's readers take Infinity and NaN as well, and whole numbers of any length.
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if least <= number <= min(most, _NUMBER_MOST):
        return float(number)
    most_too = "" if math.isinf(most) else f" and at most {most:g}"
    raise TraceError(f"line {line}: {field} must be a number of at least {least:g}{most_too}")
