"""The reference output: what a request must receive, whatever happens on the way.

The next token is a hash of all content so far, so one wrong, missing or doubled token changes
nearly every token after it.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.messages import FinishReason, Request


def reference_output(request: Request, vocab_size: int) -> tuple[tuple[int, ...], FinishReason]:
    """All new tokens of a request, carried ones included, and why it ends if nothing else ends it.

    It depends on the content and the seed alone.
    """
    tokens = list(request.committed)
    state = content_hash(request.prompt + request.committed)
    while not (tokens and tokens[-1] in request.stop_token_ids):
        if len(tokens) >= request.max_new_tokens:
            return tuple(tokens), FinishReason.LENGTH
        tokens.append(next_token(state, request.sampling.seed, vocab_size))
        state = content_hash(tokens[-1:], state)
    return tuple(tokens), FinishReason.STOP


def content_hash(tokens: Iterable[int], state: int = 0) -> int:
    """The hash of a content whose hash was `state` before these tokens."""
    for token in tokens:
        state = hash((state, token))
    return state


def next_token(state: int, seed: int, vocab_size: int) -> int:
    """The target's choice after a content with this hash."""
    return (state ^ seed) % vocab_size
