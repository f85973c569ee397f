"""What a row's decoding parameters make of its logits, place by place given the draft before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.decoding.grammar import Grammars
from replicas.decoding.logprobs import token_logprobs
from scheduler.decoding import Decoding, TokenLogprobs


class RowState:
    """Of one row: a function of its content, so it can be made anew at any time."""

    def __init__(
        self,
        decoding: Decoding,
        content: Sequence[int],
        ends: frozenset[int],
        grammars: Grammars | None,
    ) -> None:
        """`ends`: the row's stop tokens. Raises GrammarError."""
        self.decoding = decoding
        self._content = content
        """All content tokens; the replica appends to it."""
        self._ends = sorted(ends)
        self._bias_ids = [token for token, _ in decoding.logit_bias]
        self._bias = [bias for _, bias in decoding.logit_bias]
        added = decoding.frequency_penalty or decoding.presence_penalty
        penalised = added or decoding.repetition_penalty != 1.0
        self._counts = _Counts(content, decoding.prompt_tokens) if penalised else None
        self._grammar = None
        if decoding.grammar:
            assert grammars is not None, "a grammar needs the target's tokenizer"
            self._grammar = grammars.match(decoding.grammar, content[decoding.prompt_tokens :])

    def draft(self, tokens: list[int], most: int) -> list[int]:
        """What to check in place of these draft tokens: a grammar leaves out what it forbids, and
        adds what it forces. Raises GrammarError."""
        return tokens if self._grammar is None else self._grammar.draft(tokens, most)

    def adjust(self, logits: torch.Tensor, draft: Sequence[int]) -> None:
        """Change logits, [1 + len(draft), vocab], in place; those of place j follow the content and
        the first j draft tokens. Raises GrammarError."""
        if self._counts is not None:
            self._penalise(logits, draft, self._counts)
        if self._bias_ids:
            logits[:, self._bias_ids] += logits.new_tensor(self._bias)
        if self.decoding.min_tokens and self._ends:
            missing = self.decoding.min_tokens - self._new
            if missing > 0:
                logits[:missing, self._ends] = -torch.inf
        if self.decoding.bad_words:
            self._strike_bad_words(logits, draft)
        if self._grammar is not None:
            self._grammar.strike(logits, draft)

    def commit(self, tokens: Sequence[int]) -> None:
        """To be told before the tokens are in the content. Raises GrammarError."""
        if self._counts is not None:
            self._counts.add(tokens)
        if self._grammar is not None:
            self._grammar.advance(tokens)

    @property
    def _new(self) -> int:
        return len(self._content) - self.decoding.prompt_tokens

    def _penalise(self, logits: torch.Tensor, draft: Sequence[int], counts: _Counts) -> None:
        ids, new, seen = (one.to(logits.device) for one in counts.with_draft(draft))
        scores = logits[:, ids].float()
        factor = self.decoding.repetition_penalty
        if factor != 1.0:
            repeated = torch.where(scores > 0, scores / factor, scores * factor)
            scores = torch.where(seen, repeated, scores)
        scores -= self.decoding.frequency_penalty * new
        scores -= self.decoding.presence_penalty * (new > 0)
        logits[:, ids] = scores.to(logits.dtype)

    def _strike_bad_words(self, logits: torch.Tensor, draft: Sequence[int]) -> None:
        longest = max(map(len, self.decoding.bad_words)) - 1
        begin = max(self.decoding.prompt_tokens, len(self._content) - longest)
        before = [*self._content[begin:], *draft]
        for place in range(1 + len(draft)):
            written = before[: len(before) - len(draft) + place]
            struck = [
                last
                for *rest, last in self.decoding.bad_words
                if not rest or written[-len(rest) :] == rest
            ]
            if struck:
                logits[place, struck] = -torch.inf


class _Counts:
    """How often a row's tokens stand in it."""

    def __init__(self, content: Sequence[int], prompt_tokens: int) -> None:
        self._column = {token: i for i, token in enumerate(dict.fromkeys(content[:prompt_tokens]))}
        self._new = [0.0] * len(self._column)
        self.add(content[prompt_tokens:])

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            column = self._column.setdefault(token, len(self._column))
            if column == len(self._new):
                self._new.append(0.0)
            self._new[column] += 1.0

    def with_draft(self, draft: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the row's tokens and the draft's: ids, [n], int64; by place how often each is among
        the new ones, [1 + len(draft), n], float32; and whether it is there at all, bool."""
        known = len(self._new)
        column = self._column
        others = dict.fromkeys(token for token in draft if token not in column)
        place_of = column | {token: known + i for i, token in enumerate(others)}
        new = torch.zeros((1 + len(draft), len(place_of)))
        new[:, :known] = torch.tensor(self._new)
        seen = torch.zeros(new.shape, dtype=torch.bool)
        seen[:, :known] = True
        for place, token in enumerate(draft, 1):
            new[place:, place_of[token]] += 1.0
            seen[place:, place_of[token]] = True
        return torch.tensor(list(place_of)), new, seen


class DecodingRows:
    """What requests add to the steps of a batch, on the host: each row's state, None of rows that
    ask for nothing."""

    def __init__(self, states: Sequence[RowState | None]) -> None:
        self._states = states
        self._plain: dict[int, torch.Tensor] = {}
        """Of the step in hand: logits before any change, of the rows that are told of them."""
        self.told: list[list[TokenLogprobs]] = [[] for _ in states]
        """Of each row's committed tokens, over all steps of the batch."""
        self.drafts = any(state is not None and state.decoding.grammar for state in states)

    def draft(self, row: int, tokens: list[int], most: int) -> list[int]:
        state = self._states[row]
        return tokens if state is None else state.draft(tokens, most)

    def adjust(self, row: int, draft: Sequence[int], logits: torch.Tensor) -> None:
        """`RowState.adjust`, after keeping what will be told."""
        state = self._states[row]
        if state is None:
            return
        if state.decoding.logprobs is not None:
            self._plain[row] = logits.clone() if state.decoding.changes_logits else logits
        if state.decoding.changes_logits:
            state.adjust(logits, draft)

    def committed(self, row: int, tokens: Sequence[int]) -> None:
        state = self._states[row]
        if state is None:
            return
        state.commit(tokens)
        top = state.decoding.logprobs
        if top is not None:
            self.told[row] += token_logprobs(self._plain[row][: len(tokens)], tokens, top)
