"""A sequence on a replica, and what its row commits over the steps of a batch.

Knows lengths and tokens; nothing of models, caches or blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from replicas.eqspec import Outcome
from replicas.prefix import Chain
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
    """KV positions of both models that prefill batches are still to fill; 0 before any step."""
    draft_kv: int = 0
    """Valid draft KV positions: len(content) - 1 or - 2 after a step, less after draft_len 0."""

    @property
    def settled(self) -> int:
        """Positions before all that a step may write: the draft begins one before the last
        token."""
        return max(len(self.content) - 2, 0)

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


def commit(resident: Resident, tally: Tally, outcome: Outcome, row: int, k: int) -> None:
    """Append a step's tokens. Drafting fed the draft all proposed tokens but the last one."""
    tokens, accepted = outcome.committed[row], outcome.accepted[row]
    if k > 0:
        resident.draft_kv = len(resident.content) + min(accepted, k - 1)
    resident.content.extend(tokens)
    resident.tokens_left -= len(tokens)
    tally.accepted.append(accepted)
    tally.tried.append(min(accepted + 1, outcome.checked[row]))
