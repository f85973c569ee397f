"""A sequence on a replica, and what its row commits over the steps of a batch.

Knows lengths and tokens; nothing of models, drafters, caches or blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from replicas.kv_cache import Chain
from scheduler.messages import SamplingParams


@dataclass
class Resident:
    """A sequence whose KV cache is here. Target KV is valid for len(content) - 1 positions, but for
    `to_fill` while it is being prefilled."""

    content: list[int]
    tokens_left: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    chain: Chain
    """Keys of its blocks."""
    to_fill: int = 0
    """KV positions that prefill batches are still to fill; 0 before any step."""

    @property
    def settled(self) -> int:
        """Positions before all that a step may write: a drafter may begin one before the last
        token."""
        return max(len(self.content) - 2, 0)

    def commit(self, tokens: list[int]) -> None:
        """Append a step's tokens."""
        self.content.extend(tokens)
        self.tokens_left -= len(tokens)

    def finished(self, committed: list[int]) -> bool:
        """Whether it has ended with these tokens, the last that it committed."""
        return self.tokens_left == 0 or not self.stop_token_ids.isdisjoint(committed)


@dataclass(slots=True)
class Tally:
    """What became of a row's draft tokens over the steps of a batch."""

    draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    """By step: how many were right."""
    tried: list[int] = field(default_factory=list)
    """By step: how many were checked that had none but right ones before them."""

    def note(self, drafted: int, accepted: int, checked: int) -> None:
        """A step's draft tokens of the row, those that were right, and those that were checked."""
        self.draft_tokens += drafted
        self.accepted.append(accepted)
        self.tried.append(min(accepted + 1, checked))

    def accepted_at(self, draft_len: int) -> tuple[int, ...]:
        """By position, up to draft_len: in how many steps that draft token was right."""
        return _steps_beyond(tuple(self.accepted), draft_len)

    def tried_at(self, draft_len: int) -> tuple[int, ...]:
        """In how many steps it was checked and all before it were right."""
        return _steps_beyond(tuple(self.tried), draft_len)


@lru_cache(maxsize=1024)
def _steps_beyond(counts: tuple[int, ...], draft_len: int) -> tuple[int, ...]:
    """Mostly of one step, so there are few of them."""
    return tuple([sum(count > j for count in counts) for j in range(draft_len)])
