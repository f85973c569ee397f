"""What requests change in the target's logits, and what they are told of them."""

from replicas.decoding.grammar import GrammarError, Grammars, grammar_of
from replicas.decoding.logprobs import token_logprobs
from replicas.decoding.rows import DecodingRows, RowState

__all__ = ["DecodingRows", "GrammarError", "Grammars", "RowState", "grammar_of", "token_logprobs"]
