"""What an EAGLE-3 checkpoint says of its head, in either format, and the tensors that it must hold.

Formats: the original one (`midlayer.*`, a Llama config with `draft_vocab_size`) and that of the
speculators library (`layers.0.*`, the layer's config in `transformer_layer_config`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from replicas.errors import PairRefused

LAYER = "layers.0."
_LAYERS = ("llama", "qwen3")


@dataclass(frozen=True)
class Eagle3Config:
    """A head's sizes, by transformers' names where it has them, and how its layer is wired."""

    width: int
    """Of the hidden states that it passes on."""
    target_width: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Tokens that it can draft."""
    target_vocab: int
    eps: float
    aux_layers: tuple[int, ...]
    """The target's hidden states that it sees, as transformers numbers them, in its order."""
    layer: Any
    """transformers' config of its layer."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    """Whether what it passes on has passed the last norm."""
    own_embedding: bool = False

    num_hidden_layers = 1
    most = None
    drafts_by_target = False

    @property
    def hidden_size(self) -> int:
        """Of its layer's input: an embedding beside a hidden state."""
        return 2 * self.width

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The floating-point tensors that the checkpoint must hold, by the speculators format's
        names, with their shapes."""
        width, inner = self.width, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        attention, mlp = LAYER + "self_attn.", LAYER + "mlp."
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (width, len(self.aux_layers) * self.target_width),
            LAYER + "input_layernorm.weight": (width,),
            LAYER + "hidden_norm.weight": (width,),
            LAYER + "post_attention_layernorm.weight": (width,),
            attention + "q_proj.weight": (queries, 2 * width),
            attention + "k_proj.weight": (keys, 2 * width),
            attention + "v_proj.weight": (keys, 2 * width),
            attention + "o_proj.weight": (width, queries),
            mlp + "gate_proj.weight": (inner, width),
            mlp + "up_proj.weight": (inner, width),
            mlp + "down_proj.weight": (width, inner),
            "norm.weight": (width,),
            "lm_head.weight": (self.vocab_size, width),
        }
        if self.layer.model_type == "qwen3":
            shapes[attention + "q_norm.weight"] = (self.head_dim,)
            shapes[attention + "k_norm.weight"] = (self.head_dim,)
        if self.layer.attention_bias:
            shapes[attention + "q_proj.bias"] = (queries,)
            shapes[attention + "k_proj.bias"] = shapes[attention + "v_proj.bias"] = (keys,)
            shapes[attention + "o_proj.bias"] = (width,)
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (len(self.aux_layers) * self.target_width,)
        if self.fc_norm:
            for index in range(len(self.aux_layers)):
                shapes[f"fc_norm.{index}.weight"] = (self.target_width,)
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (self.target_vocab, width)
        return shapes


def eagle3_config(said: Mapping[str, Any], names: Collection[str], target: Any) -> Eagle3Config:
    """What the checkpoint's `config.json` and its tensors' names say, for a target of this config.

    Raises PairRefused.
    """
    eagle = said.get("eagle_config") or {}
    if "speculators_model_type" in said:
        if said["speculators_model_type"] != "eagle3":
            raise PairRefused(f"speculators_model_type: {said['speculators_model_type']!r}")
        of_layer = said.get("transformer_layer_config") or {}
    else:
        of_layer = said
        if not eagle.get("use_aux_hidden_state", True):
            raise PairRefused("use_aux_hidden_state: a head on one hidden state is no EAGLE-3")
    layer = _layer(of_layer)
    vocab = said.get("draft_vocab_size") or layer.vocab_size
    width, target_width = layer.hidden_size, said.get("target_hidden_size") or layer.hidden_size
    if target_width != target.hidden_size:
        raise PairRefused(
            f"target_hidden_size: {target_width}, but the target is {target.hidden_size} wide"
        )
    ids = said.get("eagle_aux_hidden_state_layer_ids") or eagle.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    own_embedding = "embed_tokens.weight" in names
    if width != target_width and not own_embedding:
        raise PairRefused("embed_tokens.weight is missing, and the target's has another width")
    return Eagle3Config(
        width=width,
        target_width=target_width,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=layer.num_key_value_heads,
        head_dim=getattr(layer, "head_dim", None) or width // layer.num_attention_heads,
        intermediate_size=layer.intermediate_size,
        vocab_size=vocab,
        target_vocab=target.vocab_size,
        eps=layer.rms_norm_eps,
        aux_layers=_aux_layers(ids, target.num_hidden_layers),
        layer=layer,
        norm_before_residual=bool(said.get("norm_before_residual")),
        norm_before_fc=bool(said.get("norm_before_fc")),
        fc_norm=bool(said.get("fc_norm")),
        norm_output=bool(said.get("norm_output")),
        own_embedding=own_embedding,
    )


def _layer(said: Mapping[str, Any]) -> Any:
    kind = said.get("model_type")
    if kind not in _LAYERS:
        raise PairRefused(f"model_type: layers of kind {kind!r}; served are {', '.join(_LAYERS)}")
    layer = AutoConfig.for_model(**said)
    if layer.num_hidden_layers != 1:
        raise PairRefused(f"num_hidden_layers: {layer.num_hidden_layers}; only one layer is served")
    if layer.hidden_act != "silu":
        raise PairRefused(f"hidden_act: {layer.hidden_act!r}; only 'silu' is served")
    return layer


def _aux_layers(ids: list[int] | None, layers: int) -> tuple[int, ...]:
    """As transformers numbers hidden states. Ids that begin with 1 count layers from 0 and mean
    what these put out."""
    numbers = ids or [2, layers // 2, layers - 3]
    if numbers[0] == 1:
        numbers = [number + 1 for number in numbers]
    if not all(0 <= number < layers for number in numbers):
        raise PairRefused(
            f"eagle_aux_hidden_state_layer_ids: {ids or numbers}: must be below the last"
            f" of the target's {layers} layers"
        )
    return tuple(numbers)
