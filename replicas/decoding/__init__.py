"""What requests change in the target's logits, and what they are told of them."""

from replicas.decoding.logprobs import token_logprobs
from replicas.decoding.rows import DecodingRows, RowState
from replicas.decoding.tokens import end_of_turn_ids, load_grammars, read_tokens
