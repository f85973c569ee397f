"""From what was seen of each request to the figures of a run. Pure: no clock, no I/O.

Times are seconds since the load began. A latency counts from `due_s`, when the request should have
been sent, never from when the driver got round to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest


@dataclass
class Record:
    """What one request has received so far."""

    prompt: int
    """Index among the prompts."""
    due_s: float
    """Intended arrival; in a closed loop when its place became free."""
    sent_s: float
    """When the call was made."""
    prompt_tokens: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""
    end_s: float | None = None
    error: str = ""
    """Status code, or name of the error; empty for a request that was served in full."""
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    recovered: int = 0
    cached_tokens: int = 0
    """Of the prompt: found in a prefix cache."""
    said: str = ""
    """The failure's own words."""

    @property
    def new_tokens(self) -> int:
        return sum(tokens for _, tokens in self.chunks)

    @property
    def step_tokens(self) -> int:
        """Those that `steps` committed, each its accepted tokens and one more. Of a stream that
        broke and was continued, `steps` and the drafts are those since then, `new_tokens` all."""
        return min(self.new_tokens, self.steps + self.accepted_tokens)


@dataclass(frozen=True)
class Distribution:
    """Of times in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """None without values."""
        if not values:
            return None
        import numpy  # --help should not wait for it

        p50, p90, p95, p99 = map(float, numpy.quantile(values, (0.5, 0.9, 0.95, 0.99)))
        mean = math.fsum(values) / len(values)
        return cls(len(values), mean, p50, p90, p95, p99, max(values))


@dataclass(frozen=True)
class Summary:
    """The figures of one run. Requests that failed count in `requests`, `failed`, `errors`,
    `elapsed_s` and `late_s` alone."""

    requests: int
    failed: int
    errors: dict[str, int]
    """Failed requests by code."""
    said: dict[str, str]
    """The words of the first failure of each code, where it had any."""
    retries: int
    """Calls that the client asked again; a request that succeeded then has not failed."""
    recovered: int
    """How often requests lost their place on a replica and were taken up again."""
    elapsed_s: float
    """From the first intended arrival's origin to the last end."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt tokens: found in a prefix cache."""
    new_tokens: int
    tokens_per_s: float
    requests_per_s: float
    latency_s: Distribution | None
    """From the intended arrival to the last token."""
    ttft_s: Distribution | None
    """From the intended arrival to the first token."""
    token_s: Distribution | None
    """Time per output token of each request: first to last token, over the tokens after the first
    arrival."""
    gap_s: Distribution | None
    """Inter-token latency: between two arrivals of tokens of one request, as a reader sees it;
    several tokens may arrive at once."""
    late_s: Distribution | None
    """How long after the intended arrival the driver made the call; inside the latencies."""
    steps: int
    """Steps times rows."""
    draft_tokens: int
    accepted_tokens: int
    acceptance: float | None
    """accepted_tokens / draft_tokens; None where nothing was drafted."""
    drafted_per_step: float | None
    """draft_tokens / steps: near a request's limit, and where the server drafts no more, fewer than
    were asked for."""
    accepted_per_step: float | None
    committed_per_step: float | None
    """Without the tokens that came before a client continued a broken stream: their steps are not
    known."""
    accepted_at: tuple[float, ...]
    """Share of the steps in which draft token j, from 0, was accepted."""


def summarise(records: Sequence[Record], retries: int = 0) -> Summary:
    """Figures of requests that have all ended."""
    assert all(record.end_s is not None for record in records), "a request has not ended"
    served = [record for record in records if not record.error]
    elapsed_s = max((record.end_s or 0.0 for record in records), default=0.0)
    new_tokens = sum(record.new_tokens for record in served)
    steps = sum(record.steps for record in served)
    drafted = sum(record.draft_tokens for record in served)
    accepted = sum(record.accepted_tokens for record in served)
    return Summary(
        requests=len(records),
        failed=len(records) - len(served),
        errors=dict(Counter(record.error for record in records if record.error)),
        said={record.error: record.said for record in reversed(records) if record.said},
        retries=retries,
        recovered=sum(record.recovered for record in served),
        elapsed_s=elapsed_s,
        prompt_tokens=sum(record.prompt_tokens for record in served),
        cached_tokens=sum(record.cached_tokens for record in served),
        new_tokens=new_tokens,
        tokens_per_s=new_tokens / elapsed_s if elapsed_s else 0.0,
        requests_per_s=len(served) / elapsed_s if elapsed_s else 0.0,
        latency_s=Distribution.of(latencies(records)),
        ttft_s=Distribution.of(first_token_times(records)),
        token_s=Distribution.of([each for record in served for each in _token_times(record)]),
        gap_s=Distribution.of(
            [
                later - earlier
                for record in served
                for (earlier, _), (later, _) in pairwise(record.chunks)
            ]
        ),
        late_s=Distribution.of([record.sent_s - record.due_s for record in records]),
        steps=steps,
        draft_tokens=drafted,
        accepted_tokens=accepted,
        acceptance=accepted / drafted if drafted else None,
        drafted_per_step=drafted / steps if steps else None,
        accepted_per_step=accepted / steps if steps else None,
        committed_per_step=sum(r.step_tokens for r in served) / steps if steps else None,
        accepted_at=tuple(count / steps for count in _summed(served)),
    )


def latencies(records: Iterable[Record]) -> list[float]:
    """Intended arrival to end, of the requests that were served."""
    return [r.end_s - r.due_s for r in records if not r.error and r.end_s is not None]


def first_token_times(records: Iterable[Record]) -> list[float]:
    """Intended arrival to first token, likewise."""
    return [r.chunks[0][0] - r.due_s for r in records if not r.error and r.chunks]


def timeline(records: Iterable[Record], elapsed_s: float, bins: int) -> list[float]:
    """Tokens per second that came in each of `bins` equal parts of the run."""
    if elapsed_s <= 0:
        return [0.0] * bins
    width_s = elapsed_s / bins
    tokens = [0] * bins
    for record in records:
        for at_s, count in record.chunks:
            tokens[min(int(at_s / width_s), bins - 1)] += count
    return [count / width_s for count in tokens]


def _token_times(record: Record) -> Iterable[float]:
    if len(record.chunks) > 1:
        (first_s, first), (last_s, _) = record.chunks[0], record.chunks[-1]
        yield (last_s - first_s) / (record.new_tokens - first)


def _summed(records: Iterable[Record]) -> list[int]:
    """Steps that accepted draft token j; never more for a later one."""
    by_position = zip_longest(*(record.accepted_at for record in records), fillvalue=0)
    return [total for counts in by_position if (total := sum(counts))]
