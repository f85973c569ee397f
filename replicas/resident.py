"""A sequence on a replica, and what its row commits over the steps of an order.

Knows lengths and tokens; nothing of models, caches or blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """KV positions of both models that prefill orders are still to fill; 0 before any step."""
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


@dataclass
class Tally:
    """What a row committed over the steps of an order."""

    steps: int
    draft_tokens: int
    accepted_at: list[int]
    tried_at: list[int]


def commit(resident: Resident, tally: Tally, outcome: Outcome, row: int, k: int) -> None:
    """Append a step's tokens. Drafting fed the draft all proposed tokens but the last one."""
    length, accepted = len(resident.content), outcome.accepted[row]
    resident.content.extend(outcome.committed[row])
    resident.tokens_left -= len(outcome.committed[row])
    if k > 0:
        resident.draft_kv = length + min(accepted, k - 1)
    tally.steps += 1
    for j in range(accepted):
        tally.accepted_at[j] += 1
    for j in range(min(accepted + 1, outcome.checked[row])):
        tally.tried_at[j] += 1
