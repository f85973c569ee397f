"""What a row's decoding parameters make of its logits, place by place given the draft before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from replicas.decoding.logprobs import token_logprobs
from replicas.grammars import PATIENT_S, GrammarError, Grammars, Mask, RowGrammar, Walk, walks
from scheduler.decoding import Decoding, TokenLogprobs
from scheduler.messages import RowFailure


class RowState:
    """Of one row: a function of its content, so it can be made anew at any time."""

    def __init__(
        self,
        decoding: Decoding,
        content: Sequence[int],
        ends: frozenset[int],
        grammars: Grammars | None,
        drafts: bool,
    ) -> None:
        """`ends`: the row's stop tokens. `drafts`: there is a drafter."""
        self.decoding = decoding
        self._content = content
        """All content tokens; the replica appends to it."""
        self._ends = sorted(ends)
        self._bias_ids = [token for token, _ in decoding.logit_bias]
        self._allowed = list(decoding.allowed_token_ids)
        self._bias = [bias for _, bias in decoding.logit_bias]
        added = decoding.frequency_penalty or decoding.presence_penalty
        penalised = added or decoding.repetition_penalty != 1.0
        self._counts = _Counts(content, decoding.prompt_tokens) if penalised else None
        self.grammar: RowGrammar | None = None
        if decoding.grammar:
            assert grammars is not None, "a grammar needs the target's tokenizer"
            new = content[decoding.prompt_tokens :]
            self.grammar = RowGrammar(grammars, decoding.grammar, new, drafts)

    def adjust(
        self, logits: torch.Tensor, draft: Sequence[int], masks: Sequence[Mask] = ()
    ) -> None:
        """Change logits, [1 + len(draft), vocab], in place; those of place j follow the content and
        the first j draft tokens. `masks`: what the grammar allows in the first places, and perhaps
        in places beyond them."""
        if self._counts is not None:
            self._penalise(logits, draft, self._counts)
        if self._bias_ids:
            logits[:, self._bias_ids] += logits.new_tensor(self._bias)
        if self._allowed:
            kept = logits[:, self._allowed]
            logits.fill_(-torch.inf)[:, self._allowed] = kept
        if self.decoding.min_tokens > self._new:
            missing = self.decoding.min_tokens - self._new
            logits[:missing, self._ends] = -torch.inf
        if self.decoding.bad_words:
            self._strike_bad_words(logits, draft)
        for scores, mask in zip(logits, masks, strict=False):
            allowed = np.unpackbits(mask, count=len(scores), bitorder="little")
            scores.masked_fill_(torch.from_numpy(allowed == 0).to(scores.device), -torch.inf)

    def commit(self, tokens: Sequence[int]) -> None:
        """To be told before the tokens are in the content."""
        if self._counts is not None:
            self._counts.add(tokens)

    @property
    def _new(self) -> int:
        return len(self._content) - self.decoding.prompt_tokens

    def _penalise(self, logits: torch.Tensor, draft: Sequence[int], counts: _Counts) -> None:
        ids, new, seen = (tensor.to(logits.device) for tensor in counts.with_draft(draft))
        scores = logits[:, ids].float()
        factor = self.decoding.repetition_penalty
        repeated = torch.where(scores > 0, scores / factor, scores * factor)
        scores = torch.where(seen, repeated, scores)
        scores -= self.decoding.frequency_penalty * new
        scores -= self.decoding.presence_penalty * (new > 0)
        # A penalty makes a token unlikely, it strikes none out.
        most = torch.finfo(logits.dtype).max
        logits[:, ids] = scores.clamp_(-most, most).to(logits.dtype)

    def _strike_bad_words(self, logits: torch.Tensor, draft: Sequence[int]) -> None:
        longest = max(map(len, self.decoding.bad_words))
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

    def __init__(self, states: Sequence[RowState | None], patient: bool = False) -> None:
        """`patient`: no row is left out of a step, as where ranks must do the same."""
        self._states = states
        self._patient = patient
        self._grammars = {
            index: state.grammar
            for index, state in enumerate(states)
            if state is not None and state.grammar is not None
        }
        self._walks: dict[int, Walk] = {}
        """Of the step in hand."""
        self._plain: dict[int, torch.Tensor] = {}
        """Of the step in hand: logits before any change, of the rows that are told of them."""
        self.extras: list[list[TokenLogprobs]] = [[] for _ in states]
        """Of each row's committed tokens, over all steps of the batch."""
        self.failures: dict[int, RowFailure] = {}
        """Why rows have stopped."""

    @property
    def drafts(self) -> bool:
        """Whether requests change drafts."""
        return bool(self._grammars)

    def redraft(
        self, drafts: Sequence[list[int]], most: Sequence[int]
    ) -> tuple[list[list[int]], set[int]]:
        """What to check in place of these drafts, and the rows that take no part in the step.

        A grammar leaves out what it forbids, and adds what it forces up to `most` tokens.
        """
        found = walks(
            self._grammars, drafts, most, len(self._grammars) == len(self._states), self._patient
        )
        self._walks = {index: walk for index, walk in found.items() if isinstance(walk, Walk)}
        kept, absent = list(drafts), set[int]()
        for index, walk in found.items():
            if isinstance(walk, Walk):
                # Its work may have begun with an earlier step's draft, which was longer.
                kept[index] = walk.draft[: most[index]]
                continue
            kept[index] = []
            absent.add(index)
            if walk is not None:
                self.failures[index] = _stopped(walk)
        return kept, absent

    def adjust(self, row: int, draft: Sequence[int], logits: torch.Tensor) -> None:
        """`RowState.adjust`, after keeping what will be told."""
        state = self._states[row]
        if state is None:
            return
        if state.decoding.logprobs is not None:
            self._plain[row] = logits.clone() if state.decoding.changes_logits else logits
        walk = self._walks.get(row)
        state.adjust(logits, draft, () if walk is None else walk.masks)

    def commit(self, committed: Sequence[list[int]]) -> None:
        """Rows have chosen these tokens. Cuts them where a grammar stops, which is a failure."""
        advancing = {
            index: self._grammars[index].advance(committed[index]) for index in self._walks
        }
        for index, work in advancing.items():
            count, stopped = work.result(PATIENT_S)
            if stopped is not None:
                self.failures[index] = _stopped(stopped)
                del committed[index][count:]
        for index, (state, tokens) in enumerate(zip(self._states, committed, strict=True)):
            if state is None or not tokens:
                continue
            state.commit(tokens)
            decoding = state.decoding
            if decoding.logprobs is not None:
                plain = self._plain[index][: len(tokens)]
                named = decoding.logprob_token_ids
                self.extras[index] += token_logprobs(plain, tokens, decoding.logprobs, named)


def _stopped(error: GrammarError) -> RowFailure:
    return RowFailure(f"the text cannot go on: {error}", "grammar")
