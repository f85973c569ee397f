"""A sequence on a replica, and what its row commits over the steps of a batch.

Knows lengths and tokens; nothing of models, drafters, caches or blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from replicas.decoding import Grammars, RowState, token_logprobs
from replicas.kv_cache import Chain
from scheduler.decoding import Decoding, TokenLogprobs
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
    decoding: Decoding | None = None
    state: RowState | None = None
    """What `decoding` makes of the content; None: not made yet."""
    to_fill: int = 0
    """KV positions that prefill batches are still to fill; 0 before any step."""

    @property
    def settled(self) -> int:
        """Positions before all that a step may write: a drafter may begin one before the last
        token."""
        return max(len(self.content) - 2, 0)

    @property
    def tells_of_prompt(self) -> bool:
        """Whether the request wants to be told of its prompt."""
        return self.decoding is not None and self.decoding.prompt_logprobs is not None

    def prompt_logprobs(
        self,
        logits: torch.Tensor,  # [positions, vocab]
        begin: int,
    ) -> tuple[TokenLogprobs, ...]:
        """What the request is told of its prompt, of the tokens after the positions from `begin`
        on; nothing if it wants nothing."""
        if self.decoding is None or self.decoding.prompt_logprobs is None:
            return ()
        end = min(begin + len(logits) + 1, self.decoding.prompt_tokens)
        tokens = self.content[begin + 1 : end]
        return token_logprobs(logits[: len(tokens)], tokens, self.decoding.prompt_logprobs)

    def row_state(self, grammars: Grammars | None) -> RowState | None:
        """None where the request asks for nothing."""
        if self.decoding is not None and self.state is None:
            self.state = RowState(self.decoding, self.content, self.stop_token_ids, grammars)
        return self.state

    def roll_back(self, length: int, tokens_left: int) -> None:
        """Make it what it was when its content had this length."""
        del self.content[length:]
        self.tokens_left = tokens_left
        self.state = None

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

    asked_tokens: int = 0
    draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    """By step: how many were right."""
    tried: list[int] = field(default_factory=list)
    """By step: how many were asked for that had none but right ones before them."""

    def note(self, asked: int, drafted: int, accepted: int, checked: int) -> None:
        """Of a step: draft tokens asked for, drafted, right, and checked; where a verification
        budget left some out nobody knows what became of them."""
        self.asked_tokens += asked
        self.draft_tokens += drafted
        self.accepted.append(accepted)
        self.tried.append(min(accepted + 1, asked if checked == drafted else checked))

    def accepted_at(self, draft_len: int) -> tuple[int, ...]:
        """By position, up to draft_len: in how many steps that draft token was right."""
        return _steps_beyond(tuple(self.accepted), draft_len)

    def tried_at(self, draft_len: int) -> tuple[int, ...]:
        """In how many steps it was asked for and all before it were right."""
        return _steps_beyond(tuple(self.tried), draft_len)


@lru_cache(maxsize=1024)
def _steps_beyond(counts: tuple[int, ...], draft_len: int) -> tuple[int, ...]:
    """Mostly of one step, so there are few of them."""
    return tuple([sum(count > j for count in counts) for j in range(draft_len)])
