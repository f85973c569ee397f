"""What a text must be: a grammar as a text, its makers, and the grammars of one target.

A grammar is a text that llguidance's own makers return (from a JSON schema, a regular expression,
or its variant of Lark), so that a frontend can check it and a replica can run it.
"""

from __future__ import annotations

import itertools
import json
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from replicas.grammars.state import Follower, GrammarError, GrammarState

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""One way to write a document: a small model that is free to add spaces may never stop."""
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
"""Such a rule is none of Lark."""
LIMITS = LLParserLimits(
    max_items_in_row=20_000,  # a schema has four for each optional property
    step_max_items=200_000,
    max_lexer_states=50_000,  # of 1 to 2 kB each
    verbose_errors=False,  # else errors quote the row's text
)


class Grammars:
    """The grammars of one target: its tokens, and which of them end a text."""

    def __init__(
        self, tokenizer: Any, ends: Sequence[int], vocab: int, limits: LLParserLimits = LIMITS
    ) -> None:
        """`tokenizer`: of `tokenizers`. `vocab`: the width of the logits."""
        self._limits = limits
        self._ends = frozenset(ends)
        self._tokens = LLTokenizer(_plain(tokenizer), n_vocab=vocab, eos_token=list(ends))
        self._followers: weakref.WeakValueDictionary[str, Follower] = weakref.WeakValueDictionary()

    def check(self, grammar: str) -> None:
        """Compile it and make the first mask. Raises GrammarError."""
        self.match(grammar, ()).mask()

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text; a special token its name."""
        return self._tokens.decode_bytes([token]).lstrip(b"\xff")

    def is_special(self, token: int) -> bool:
        """Whether a grammar names this token by its id, and never by its text."""
        return self._tokens.is_special_token(token)

    def match(self, grammar: str, tokens: Sequence[int], drafts: bool = False) -> GrammarState:
        """The state after these new tokens, which the grammar allows. Raises GrammarError.

        Compiles the grammar, and makes a mask for each of the tokens. `drafts`: drafts will be
        followed, which takes another matcher.
        """
        follower = self._follower(grammar) if drafts else None
        state = GrammarState(self._compiled(grammar), follower, self._ends)
        _, stopped = state.advance(tokens)
        if stopped is not None:
            raise stopped
        return state

    def allows(self, grammar: str, tokens: Sequence[int]) -> bool:
        """Whether a text may begin with these tokens. Unlike `match` it makes no masks, which take
        most of the time. Raises GrammarError."""
        until_end = list(itertools.takewhile(lambda token: token not in self._ends, tokens))
        return self._compiled(grammar).validate_tokens(until_end) == len(until_end)

    def _compiled(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().split("\n<")[0])
        return matcher

    def _follower(self, grammar: str) -> Follower:
        """That of all rows with this grammar: compiled once while there are any."""
        follower = self._followers.get(grammar)
        if follower is None:
            follower = self._followers.setdefault(grammar, Follower(self._compiled(grammar)))
        return follower


def grammar_of(kind: str, texts: Sequence[str], parts: Mapping[str, Sequence[Any]] = {}) -> str:
    """The grammar of texts that are documents of a JSON schema, written as `json.dumps` writes
    them; that match a regular expression; that one in Lark, GBNF or EBNF derives; or that are one
    of `texts`. `parts`: what the one of Lark refers to as @name, each as the arguments of this
    function.

    Raises GrammarError for a schema that is no JSON; `Grammars.check` finds all else.
    """
    if parts:
        return _joined(grammar_of(kind, texts), parts)
    match kind:
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(texts[0], overrides=_JSON_OPTIONS)
            except ValueError as error:
                raise GrammarError(str(error)) from None
        case "regex":
            return LLMatcher.grammar_from_regex(texts[0])
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(texts[0]))
        case "choice":
            # As one token of the grammar: with a rule for each text 20,000 of them take eight times
            # as long.
            choices = " | ".join(map(json.dumps, texts))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    raise AssertionError(kind)


def _lark(text: str) -> str:
    """Of a grammar in Lark, GBNF or EBNF. Raises GrammarError."""
    if _GBNF.search(text) is None:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:
        # The converter asserts and raises what comes.
        raise GrammarError(f"no GBNF: {error}") from None


def _joined(grammar: str, parts: Mapping[str, Sequence[Any]]) -> str:
    """The grammar with those that it refers to."""
    grammars = _grammars(grammar)
    for name, arguments in parts.items():
        first, *others = _grammars(grammar_of(*arguments))
        grammars += [first | {"name": name}, *others]
    return json.dumps({"grammars": grammars})


def _grammars(grammar: str) -> list[dict[str, Any]]:
    """Those of a text, which is JSON or Lark."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    try:
        return list(json.loads(grammar)["grammars"])
    except (ValueError, KeyError, TypeError) as error:
        raise GrammarError(f"no grammar: {error}") from None


def _plain(tokenizer: Any) -> str:
    """The tokenizer as JSON, without what a caller may have set for padding and truncation."""
    described = json.loads(tokenizer.to_str())
    described["padding"] = described["truncation"] = None
    return json.dumps(described)
