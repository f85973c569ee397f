"""Grammars: which tokens may come next, by llguidance.

A grammar is a text that llguidance's own makers return (from a JSON schema, a regular expression,
or its variant of Lark), so that a frontend can check it and a replica can run it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""One way to write a document: a small model that is free to add spaces may never stop."""


class GrammarError(ValueError):
    """A grammar that cannot be used; the text says why."""


class Grammars:
    """The grammars of one target: its tokens, and which of them end a text."""

    def __init__(self, tokenizer: Any, ends: Sequence[int], vocab: int) -> None:
        """`tokenizer`: of `tokenizers`. `vocab`: the width of the logits."""
        self._ends = frozenset(ends)
        self._tokens = LLTokenizer(_plain(tokenizer), n_vocab=vocab, eos_token=list(ends))

    def check(self, grammar: str) -> None:
        """Raises GrammarError."""
        wrong, said = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens)
        if wrong:
            raise GrammarError(said[0])

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text; a special token its name."""
        return self._tokens.decode_bytes([token]).lstrip(b"\xff")

    def match(self, grammar: str, tokens: Sequence[int]) -> GrammarState:
        """The state after these new tokens, which the grammar allows. Raises GrammarError."""
        state = GrammarState(LLMatcher(self._tokens, grammar, log_level=0), self._ends)
        state.advance(tokens)
        return state


class GrammarState:
    """Where one row is in its grammar. After a token that ends the text it stays where it is."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends

    def draft(self, tokens: list[int], most: int) -> list[int]:
        """The draft as far as it is allowed, then what must follow; `most` tokens at most.

        Raises GrammarError.
        """
        kept = tokens[: self._matcher.validate_tokens(tokens)]
        if len(kept) < most and self._ends.isdisjoint(kept):
            self._matcher.consume_tokens(kept)
            forced = self._matcher.compute_ff_tokens()
            self._matcher.rollback(len(kept))
            kept += forced[: most - len(kept)]
        self._check()
        return kept

    def strike(self, logits: torch.Tensor, draft: Sequence[int]) -> None:
        """Put -inf in place of the logits, [1 + len(draft), vocab], of tokens that are not allowed:
        in place j after the first j draft tokens.

        Places after a draft token that is not allowed, or that ends the text, stay as they are: the
        row never gets there. Raises GrammarError.
        """
        taken = 0
        for place in range(1 + len(draft)):
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._check()
            allowed = np.unpackbits(bits, count=logits.shape[-1], bitorder="little")
            logits[place].masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)
            if place == len(draft) or not allowed[draft[place]] or draft[place] in self._ends:
                break
            self._matcher.consume_token(draft[place])
            taken += 1
        self._matcher.rollback(taken)
        self._check()

    def advance(self, tokens: Sequence[int]) -> None:
        """The row has committed these. Raises GrammarError."""
        for token in tokens:
            if token in self._ends:
                return
            self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        # What llguidance says quotes the row's text, which no log may hold.
        if self._matcher.is_error():
            raise GrammarError(f"the grammar stopped: {self._matcher.stop_reason()}")


def grammar_of(kind: str, texts: Sequence[str]) -> str:
    """The grammar of texts that are documents of a JSON schema, written as `json.dumps` writes
    them; that match a regular expression; that one of Lark derives; or that are one of `texts`.

    Raises GrammarError for a schema that is no JSON; `Grammars.check` finds all else.
    """
    match kind:
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(texts[0], overrides=_JSON_OPTIONS)
            except ValueError as error:
                raise GrammarError(str(error)) from None
        case "regex":
            return LLMatcher.grammar_from_regex(texts[0])
        case "grammar":
            return LLMatcher.grammar_from_lark(texts[0])
        case "choice":
            # As one token of the grammar: with a rule for each text 2,000 are too many to parse.
            choices = " | ".join(map(json.dumps, texts))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    raise AssertionError(kind)


def _plain(tokenizer: Any) -> str:
    """The tokenizer as JSON, without what a caller may have set for padding and truncation."""
    described = json.loads(tokenizer.to_str())
    described["padding"] = described["truncation"] = None
    return json.dumps(described)
