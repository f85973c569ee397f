"""One admitted request as a frontend keeps it, whichever pool serves it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from scheduler.decoding import TokenLogprobs
from scheduler.messages import Emit, FailureRecord, Finish, Reject, Request, Submit, Usage

_PROBATION_TOKENS = 64
"""So many tokens on, a request is out of quarantine again; an event may bring as many."""


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """An admitted request: what was delivered and whether it has ended."""

    request: Request
    deadline_s: float
    tokens: list[int]
    """All new tokens so far, those that came with the request included."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens that did not come with the request, where they are asked for."""
    drafted: list[bool] = field(default_factory=list)
    """Of the same tokens, whether each was an accepted draft token or the target's own."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pool_id: str = ""
    """The id it has in the current session."""
    finish: Finish | None = None
    reject: Reject | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    sent_s: float | None = None
    """When the current session's pool was told of it; None: it does not know it."""
    validated: bool = False
    """Whether a pool with replicas did not refuse it, or it has tokens of one."""
    cancelled: bool = False
    record: FailureRecord = field(default_factory=FailureRecord)
    """What pools have found out about it; the next one is told."""
    pool_failures: int = 0
    """How many pools in a row have ended in an event of this request, without a new token."""
    recovered: int = 0
    first_s: float = 0.0
    """When the first new token came; 0 before."""
    last_s: float = 0.0
    """When the last one came; 0 before the first."""
    cut: str = ""
    """Why it ends here though it could go on elsewhere."""
    shard: int = 0
    """The shard that it was handed to."""

    @property
    def tokens_left(self) -> int:
        """How many tokens it may still get."""
        return self.request.max_new_tokens - len(self.tokens)

    def to_submit(self, now_s: float) -> Submit:
        """What a pool is told of it; it goes on where it is."""
        request = replace(
            self.request,
            id=self.pool_id,
            committed=tuple(self.tokens),
            timeout_s=max(self.deadline_s - now_s, 0.001),
        )
        return Submit(request, self.recovered > 0, self.validated, self.record)

    def take(self, update: Emit, now_s: float) -> None:
        """New tokens from the pool; without tokens what it says of the prompt."""
        start, tokens, extras = update.start, update.tokens, update.extras
        if not tokens:
            # It may come again after a loss, and is the same.
            self.prompt_logprobs[start : start + len(extras)] = extras
            return
        assert start == len(self.tokens), "updates neither skip nor repeat a token"
        self.validated = True
        self.first_s = self.first_s or now_s
        self.last_s = now_s
        self.tokens.extend(tokens)
        self.logprobs.extend(extras)
        end = len(self.drafted) + len(tokens)
        for accepted in update.accepted:
            self.drafted += [True] * accepted
            self.drafted.append(False)
        del self.drafted[end:]
        self.changed.set()

    def pool_failed(self) -> None:
        """A pool has ended in an event of this request, perhaps among others: it runs alone until
        it has come beyond that point."""
        length = len(self.request.prompt) + len(self.tokens)
        self.pool_failures = self.pool_failures + 1 if length <= self.record.broke_at else 1
        self.record = replace(
            self.record,
            rows_limit=1,
            broke_at=max(length, self.record.broke_at),
            quarantined_until=max(length + _PROBATION_TOKENS, self.record.quarantined_until),
        )

    def usage(self, last: Usage) -> Usage:
        """`last` is what it used in the session where it ended; how often it was taken up again is
        of all."""
        return replace(last, recovered=last.recovered + self.recovered)

    def end(self) -> None:
        self.changed.set()
        self.ended.set()
