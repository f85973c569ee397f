"""What a request asks of a replica beyond sampling; the scheduler passes it on unread.

All of it is a function of the row's own tokens, so it is exact whatever drafts and whatever runs
beside it. A logit is changed in this order: repetition penalty, frequency and presence penalty,
bias; then tokens are struck out: all but the allowed ones, stop tokens before `min_tokens`, bad
words, and what the grammar does not allow. Temperature and the filters of sampling come after.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

ENTRY = struct.Struct("<If")
"""A token id and its log-probability, of which float32 keeps all bits."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """Changes to the target's logits, and what is told of them."""

    prompt_tokens: int
    """Tokens of the content that are prompt; those after it are new."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token id and what is added to its logit."""
    repetition_penalty: float = 1.0
    """Of tokens in the prompt or among the new ones (arXiv 1909.05858): a logit above 0 is divided
    by it, one below is multiplied."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it is among the new ones."""
    presence_penalty: float = 0.0
    """Taken once, if it is among them."""
    min_tokens: int = 0
    """Stop tokens are struck out until there are so many new tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of new tokens that must not appear: the last token is struck out after the rest."""
    allowed_token_ids: tuple[int, ...] = ()
    """Tokens of which each new one is; empty: any."""
    grammar: str = ""
    """What the new tokens must be a text of, as llguidance's grammar; empty: anything."""
    logprobs: int | None = None
    """Of each new token its log-probability, and of the so many likeliest ones in its place; -1: of
    the whole vocabulary. None: nothing is told."""
    logprob_token_ids: tuple[int, ...] = ()
    """Of each new token these are told of, in place of the likeliest ones."""
    prompt_logprobs: int | None = None
    """The same of each prompt token but the first."""

    @property
    def changes_logits(self) -> bool:
        """Whether a token may be chosen otherwise than from the plain logits."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
            or self.min_tokens
            or self.bad_words
            or self.allowed_token_ids
            or self.grammar
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities in one place: log-softmax of the target's own logits, before any
    change, temperature or filter."""

    logprob: float
    """Of the token that stands there."""
    rank: int
    """Its rank by probability, from 1; tokens of equal logits share the best."""
    packed: bytes = b""
    """`top` as it travels: of each token `ENTRY`, so that no process on the way reads what may be
    a whole vocabulary."""

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The likeliest token ids and theirs, falling; of equals the lower id first. Or those of
        `logprob_token_ids`, in their order."""
        return tuple(ENTRY.iter_unpack(self.packed))

    @property
    def told(self) -> int:
        """How many log-probabilities it holds."""
        return 1 + len(self.packed) // ENTRY.size
