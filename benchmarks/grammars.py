"""Two libraries for grammars beside one another: the first use of a schema, and a step's masks.

    python -m benchmarks.grammars --target smollm2

Wants `pip install xgrammar`, which Lockstep does not need; its own library is llguidance. Both
follow the same documents of the same schemas with drafts of four tokens, none of them wrong. Their
masks differ: llguidance keeps special tokens out of strings and writes fixed text in one way only.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import xgrammar
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoTokenizer

from benchmarks.identity import SCHEMAS
from replicas.decoding import grammar_of
from replicas.models.load import resolve

DRAFT_TOKENS = 4
DOCUMENTS: tuple[Any, ...] = (
    "it depends",
    ["the sky", "light", "blue"],
    {"answer": "Because the air scatters short waves of light the most.", "certainty": 97},
    {"language": "English", "topics": ["physics", "weather"], "needs_sources": False},
)
"""One of each schema."""


class LLGuidance:
    def __init__(self, tokenizer: Any) -> None:
        of = tokenizer.backend_tokenizer.to_str()
        self._tokens = LLTokenizer(of, eos_token=tokenizer.eos_token_id)

    def begin(self, schema: str) -> None:
        matcher = LLMatcher(self._tokens, grammar_of("json_schema", [schema]))
        self.mask, self.take = matcher.compute_bitmask, matcher.consume_token
        self.give_back = matcher.rollback


class XGrammar:
    def __init__(self, tokenizer: Any) -> None:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        self._bits = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def begin(self, schema: str) -> None:
        compiled = self._compiler.compile_json_schema(schema, any_whitespace=False)
        self._matcher = matcher = xgrammar.GrammarMatcher(compiled)
        self.take, self.give_back = matcher.accept_token, matcher.rollback

    def mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._bits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve(args.target))
    libraries: dict[str, Any] = {
        "llguidance": LLGuidance(tokenizer),
        "xgrammar": XGrammar(tokenizer),
    }
    first_s: dict[str, list[float]] = {name: [] for name in libraries}
    step_s: dict[str, list[float]] = {name: [] for name in libraries}
    for _ in range(args.rounds):
        for schema, document in zip(SCHEMAS, DOCUMENTS, strict=True):
            tokens = tokenizer.encode(json.dumps(document), add_special_tokens=False)
            for name, library in libraries.items():
                begun_s = perf_counter()
                library.begin(json.dumps(schema))
                library.mask()
                first_s[name].append(perf_counter() - begun_s)
                for at in range(0, len(tokens) - DRAFT_TOKENS, 2):
                    begun_s = perf_counter()
                    for token in tokens[at : at + DRAFT_TOKENS]:
                        library.mask()
                        assert library.take(token)
                    library.mask()
                    library.give_back(DRAFT_TOKENS)
                    step_s[name].append(perf_counter() - begun_s)
                    for token in tokens[at : at + 2]:
                        library.take(token)
    for name in libraries:
        print(
            f"{name}: first use of a schema {1e3 * median(first_s[name]):.2f} ms,"
            f" {1e3 * max(first_s[name]):.2f} at most;"
            f" a row's step with {DRAFT_TOKENS} draft tokens {1e6 * median(step_s[name]):.0f} us,"
            f" {1e6 * float(np.percentile(step_s[name], 99)):.0f} in 1 of 100"
        )


if __name__ == "__main__":
    main()
