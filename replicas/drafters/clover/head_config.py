"""What a Clover-2 checkpoint says of its head, and the tensors that it must hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from replicas.drafters.checkpoints import layer_tensors
from replicas.errors import PairRefused

FIRST, LATER = "clover_head_mlp_rnn", "clover_head_mlp_rnn2"
"""The regressive blocks: that of the last committed token, and that of drafted ones."""
EMBEDDING, HEAD = "clover_embed_tokens.weight", "lm_head.weight"
"""Copies of the target's output matrix, which may be left out."""


@dataclass(frozen=True)
class CloverConfig:
    """A head's sizes, by transformers' names where it has them."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    eps: float
    layer: Any
    """transformers' config of its augmenting layers."""
    most: int
    """Draft tokens that it is trained for."""
    aux_layers: tuple[int, ...]
    """The target's hidden states that it sees: those after the last layer, before the norm."""
    own_embedding: bool
    own_head: bool

    @property
    def target_vocab(self) -> int:
        return self.vocab_size

    @property
    def drafts_by_target(self) -> bool:
        return not (self.own_head and self.own_embedding)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The floating-point tensors that the checkpoint must hold, with their shapes."""
        width, inner = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "clover_norm.weight": (width,),
            "clover_head_norm.weight": (width,),
            "clover_head_mlp.weight": (width, width),
            "clover_head_mlp.bias": (width,),
            "clover_head_mlp2.weight": (width, 2 * width),
            "clover_head_mlp2.bias": (width,),
        }
        for block in (FIRST, LATER):
            shapes[f"{block}.input_layernorm.weight"] = (width,)
            for letter in "qkv":
                shapes[f"{block}.{letter}.weight"] = (width, width)
                shapes[f"{block}.{letter}.bias"] = (width,)
        for number in range(self.num_hidden_layers):
            layer = f"layers.{number}."
            shapes |= layer_tensors(layer, width, queries, keys, inner)
        if self.own_embedding:
            shapes[EMBEDDING] = (self.vocab_size, width)
        if self.own_head:
            shapes[HEAD] = (self.vocab_size, width)
        return shapes


def clover_config(said: Mapping[str, Any], names: Collection[str], target: Any) -> CloverConfig:
    """What the checkpoint's `config.json` and its tensors' names say, for a target of this config.

    Raises PairRefused.
    """
    own = said.get("clover")
    if not isinstance(own, Mapping):
        raise PairRefused("clover: must be given, with num_layers and num_heads")
    layers, heads = (_count(own, name) for name in ("num_layers", "num_heads"))
    if said.get("model_type") != "llama":
        raise PairRefused(
            f"model_type: layers of kind {said.get('model_type')!r}; served are llama"
        )
    layer = AutoConfig.for_model(**said)
    if layer.hidden_act != "silu":
        raise PairRefused(f"hidden_act: {layer.hidden_act!r}; only 'silu' is served")
    if layer.attention_bias or layer.mlp_bias:
        raise PairRefused("attention_bias: layers with biases are not served")
    if layer.hidden_size != target.hidden_size:
        raise PairRefused(
            f"hidden_size: {layer.hidden_size}, but the target is {target.hidden_size} wide"
        )
    if layer.vocab_size != target.vocab_size:
        raise PairRefused(
            f"vocab_size: {layer.vocab_size}, but the target has {target.vocab_size} tokens"
        )
    return CloverConfig(
        hidden_size=layer.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        intermediate_size=layer.intermediate_size,
        vocab_size=layer.vocab_size,
        eps=layer.rms_norm_eps,
        layer=layer,
        most=heads,
        aux_layers=(target.num_hidden_layers,),
        own_embedding=EMBEDDING in names,
        own_head=HEAD in names,
    )


def _count(own: Mapping[str, Any], name: str) -> int:
    count = own.get(name)
    if not isinstance(count, int) or count < 1:
        raise PairRefused(f"clover.{name}: must be 1 or more, is {count!r}")
    return count
