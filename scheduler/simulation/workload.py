"""Which requests come and when, drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

Lengths = Callable[[Random], int]
"""Draws a length in tokens, at least 1."""


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
            if 1 <= median < math.inf and 0 <= sigma < math.inf:
                return lognormal(median, sigma)
        else:
            first, _, last = text.partition("..")
            least, most = int(first), int(last or first)
            if 1 <= least <= most:
                return uniform(least, most)
    except ValueError:
        pass
    raise ValueError(f"expected N, N..M or lognormal:MEDIAN:SIGMA tokens, got {text!r}")


def poisson(rate_per_s: float, rng: Random) -> Iterator[float]:
    """Independent arrivals, `rate_per_s` on average; without end."""
    now_s = 0.0
    while True:
        now_s += rng.expovariate(rate_per_s)
        yield now_s


def drawn(
    arrivals: Iterator[float] | None,
    count: int,
    prompts: Lengths,
    new: Lengths,
    acceptance: float,
    rng: Random,
) -> list[WorkloadRequest]:
    """`count` requests that come at these times. None: all at once."""
    requests = []
    for _ in range(count):
        at_s = 0.0 if arrivals is None else next(arrivals)
        requests.append(WorkloadRequest(at_s, prompts(rng), new(rng), acceptance))
    return requests
