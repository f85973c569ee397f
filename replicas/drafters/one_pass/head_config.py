"""What a one-pass checkpoint says of its head, in any format, and the tensors that it must hold.

Formats: z-lab's DFlash (keys in `dflash_config` or beside it, the target's embedding and output
matrix), DeepSpec's DFlash and DSpark (`Qwen3DSparkModel` for both, flat keys, matrices of their
own), and that of the speculators library (the layers' config in `transformer_layer_config`).

DSpark is DFlash with a Markov head, maybe a confidence head, and other slots: a slot of DFlash
predicts the token at its own position, one of DSpark the next token, so that the anchor's counts.
Which layers of the target a head sees, no format has a default for: a wrong guess would only draft
a little worse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from replicas.drafters.checkpoints import layer_tensors
from replicas.errors import PairRefused

MASK = "mask_embedding"
_KINDS = ("dflash", "dspark")
_Z_LAB, _DEEPSPEC = "DFlashDraftModel", "Qwen3DSparkModel"
_MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class OnePassConfig:
    """A head's sizes, by transformers' names where it has them, and how it is wired."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Tokens that it can draft."""
    target_vocab: int
    target_width: int
    eps: float
    aux_layers: tuple[int, ...]
    """The target's hidden states that it sees, as transformers numbers them, in its order."""
    layer: Any
    """transformers' config of its layers."""
    windows: tuple[int | None, ...]
    """Positions that each layer looks back, itself included; None: all."""
    causal: tuple[bool, ...]
    """Whether a slot sees only slots before itself, by layer."""
    block_size: int
    """Slots of a block."""
    first: int
    """The first slot whose output is a draft token."""
    mask_token_id: int | None
    """What stands in all slots but the anchor's; None: a vector of its own."""
    own_embedding: bool
    own_head: bool
    markov_rank: int = 0
    markov_head: str = "vanilla"
    confidence_width: int = 0
    """Of what its confidence head sees; 0: it has none."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def most(self) -> int:
        """Draft tokens of a block."""
        return self.block_size - self.first

    @property
    def drafts_by_target(self) -> bool:
        return not self.own_head

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The floating-point tensors that the checkpoint must hold, with their shapes."""
        width, inner = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (width, len(self.aux_layers) * self.target_width),
            "hidden_norm.weight": (width,),
            "norm.weight": (width,),
        }
        for number in range(self.num_hidden_layers):
            layer = f"layers.{number}."
            attention = layer + "self_attn."
            shapes |= layer_tensors(layer, width, queries, keys, inner)
            shapes |= {
                attention + "q_norm.weight": (self.head_dim,),
                attention + "k_norm.weight": (self.head_dim,),
            }
            if self.layer.attention_bias:
                shapes[attention + "q_proj.bias"] = (queries,)
                shapes[attention + "k_proj.bias"] = shapes[attention + "v_proj.bias"] = (keys,)
                shapes[attention + "o_proj.bias"] = (width,)
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (self.target_vocab, width)
        if self.own_head:
            shapes["lm_head.weight"] = (self.vocab_size, width)
        if self.mask_token_id is None:
            shapes[MASK] = (width,)
        return shapes | self._of_markov | self._of_confidence

    @property
    def _of_markov(self) -> dict[str, tuple[int, ...]]:
        rank, width = self.markov_rank, self.hidden_size
        if not rank:
            return {}
        shapes: dict[str, tuple[int, ...]] = {
            "markov_head.markov_w1.weight": (self.target_vocab, rank),
            "markov_head.markov_w2.weight": (self.vocab_size, rank),
        }
        if self.markov_head == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, width + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        elif self.markov_head == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
        return shapes

    @property
    def _of_confidence(self) -> dict[str, tuple[int, ...]]:
        if not self.confidence_width:
            return {}
        return {
            "confidence_head.proj.weight": (1, self.confidence_width),
            "confidence_head.proj.bias": (1,),
        }


def one_pass_config(said: Mapping[str, Any], names: Collection[str], target: Any) -> OnePassConfig:
    """What the checkpoint's `config.json` and its tensors' names say, for a target of this config.

    Raises PairRefused.
    """
    kind = said.get("speculators_model_type")
    [maker] = said.get("architectures") or [None]
    if kind is not None:
        if kind not in _KINDS:
            raise PairRefused(f"speculators_model_type: {kind!r}; served are {', '.join(_KINDS)}")
        of_layers = said.get("transformer_layer_config") or {}
    elif maker in (_Z_LAB, _DEEPSPEC):
        of_layers = said
    else:
        raise PairRefused(f"architectures: {maker!r}; served are {_Z_LAB} and {_DEEPSPEC}")
    keys = {**said, **(said.get("dflash_config") or {})}
    if keys.get("projector_type", "dflash") not in _KINDS:
        raise PairRefused(f"projector_type: {keys['projector_type']!r} is not served")
    if keys.get("shift_label"):
        raise PairRefused("shift_label: heads whose labels are shifted are not served")
    layer = _layers(of_layers)
    own_embedding, own_head = ("embed_tokens.weight" in names, "lm_head.weight" in names)
    width, target_width = layer.hidden_size, _target_width(keys, layer, target)
    for own, what in ((own_embedding, "embed_tokens.weight"), (own_head, "lm_head.weight")):
        if width != target_width and not own:
            raise PairRefused(f"{what} is missing, and the target's has another width")
    vocab = keys.get("draft_vocab_size") or target.vocab_size
    if vocab != target.vocab_size and not own_head:
        raise PairRefused(f"lm_head.weight is missing: the head drafts from {vocab} tokens")
    from_anchor = keys.get("sample_from_anchor", maker == _DEEPSPEC or kind == "dspark")
    block_size, first = _number(keys, "block_size"), 0 if from_anchor else 1
    if block_size <= first:
        raise PairRefused(f"block_size: {block_size} leaves no draft token")
    windows, causal = _attention(keys, layer, kind is not None)
    rank = keys.get("markov_rank") or 0
    markov = keys.get("markov_head_type") or "vanilla"
    if rank and markov not in _MARKOV_HEADS:
        raise PairRefused(f"markov_head_type: {markov!r}; served are {', '.join(_MARKOV_HEADS)}")
    confident = keys.get("enable_confidence_head", False)
    with_markov = bool(rank) and keys.get("confidence_head_with_markov", False)
    return OnePassConfig(
        hidden_size=width,
        num_hidden_layers=layer.num_hidden_layers,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        intermediate_size=layer.intermediate_size,
        vocab_size=vocab,
        target_vocab=target.vocab_size,
        target_width=target_width,
        eps=layer.rms_norm_eps,
        aux_layers=_aux_layers(keys, kind is not None, target.num_hidden_layers),
        layer=layer,
        windows=windows,
        causal=causal,
        block_size=block_size,
        first=first,
        mask_token_id=None if MASK in names else _mask(keys, target.vocab_size),
        own_embedding=own_embedding,
        own_head=own_head,
        markov_rank=rank,
        markov_head=markov,
        confidence_width=width + rank * with_markov if confident else 0,
        embedding_scale=float(keys.get("input_embedding_scale") or 1.0),
        logit_scale=float(keys.get("output_multiplier") or 1.0),
        softcap=keys.get("final_logit_softcapping"),
    )


def _layers(said: Mapping[str, Any]) -> Any:
    if said.get("model_type") != "qwen3":
        raise PairRefused(
            f"model_type: layers of kind {said.get('model_type')!r}; served are qwen3"
        )
    layer = AutoConfig.for_model(**said)
    if layer.hidden_act != "silu":
        raise PairRefused(f"hidden_act: {layer.hidden_act!r}; only 'silu' is served")
    return layer


def _target_width(keys: Mapping[str, Any], layer: Any, target: Any) -> int:
    width: int = keys.get("target_hidden_size") or layer.hidden_size
    if width != target.hidden_size:
        raise PairRefused(
            f"target_hidden_size: {width}, but the target is {target.hidden_size} wide"
        )
    layers = keys.get("num_target_layers", target.num_hidden_layers)
    if layers != target.num_hidden_layers:
        raise PairRefused(
            f"num_target_layers: {layers}, but the target has {target.num_hidden_layers}"
        )
    return width


def _attention(
    keys: Mapping[str, Any], layer: Any, speculators: bool
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """The window of each layer, and whether it is causal within a block. By convention sliding
    layers are and full ones are not."""
    sliding = [kind == "sliding_attention" for kind in layer.layer_types]
    window = layer.sliding_window
    if any(sliding) and not window:
        raise PairRefused("sliding_window: must be given, because the head has sliding layers")
    causal = [layer and not keys.get("sliding_window_non_causal", False) for layer in sliding]
    forced = keys.get("is_causal", keys.get("causal"))
    if not speculators and forced is not None:
        causal = [bool(forced)] * len(sliding)
    return tuple(window if layer else None for layer in sliding), tuple(causal)


def _aux_layers(keys: Mapping[str, Any], speculators: bool, layers: int) -> tuple[int, ...]:
    """As transformers numbers hidden states. The speculators format says these; the others name
    layers from 0 on and mean what they put out, with -1 for the embedding."""
    name = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    ids = keys.get(name)
    if not ids:
        raise PairRefused(f"{name} is missing: the layers of the target that the head sees")
    numbers = ids if speculators else [number + 1 for number in ids]
    if not all(0 <= number < layers for number in numbers):
        raise PairRefused(f"{name}: {ids}: must be below the last of the target's {layers} layers")
    return tuple(numbers)


def _mask(keys: Mapping[str, Any], vocab: int) -> int:
    number = _number(keys, "mask_token_id")
    if not 0 <= number < vocab:
        raise PairRefused(f"mask_token_id: {number}: must be one of the target's {vocab} tokens")
    return number


def _number(keys: Mapping[str, Any], name: str) -> int:
    if not isinstance(keys.get(name), int):
        raise PairRefused(f"{name} is missing")
    return int(keys[name])
