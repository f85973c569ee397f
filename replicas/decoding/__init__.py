"""What requests change in the target's logits, and what they are told of them."""

from replicas.decoding.grammar import GrammarError, Grammars
from replicas.decoding.logprobs import token_logprobs
from replicas.decoding.rows import DecodingRows, RowState

__all__ = ["DecodingRows", "GrammarError", "Grammars", "RowState", "token_logprobs"]
