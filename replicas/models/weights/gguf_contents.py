"""What of a GGUF file changes what is computed: it is applied, or the file is refused.

transformers leaves out what it does not know, without a word. So what it reads is compared with
what the file holds. Here stands the rest: what is applied beside it, and what is harmless, with the
reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicas.errors import PairRefused

_HARMLESS = {
    r"general\..*": "describes the file",
    r"GGUF\..*": "is the file's own head",
    r"quantize\..*": "tells how the weights were quantized; each tensor says its own type",
    r"split\..*": "counts files, of which there is one",
    r"tokenizer\.chat_template\..*": "is a further template, which requests cannot name",
    r"tokenizer\.ggml\.(tokens|token_type|merges|scores|model|pre|precompiled_charsmap)": "is read",
    r"tokenizer\.ggml\.(bos|eos|unknown|padding|seperator|separator|mask|cls)_token_id": "is read",
    r"tokenizer\.ggml\.(add_bos_token|add_eos_token|add_space_prefix)": "is read",
    r"tokenizer\.ggml\.(eot|eom)_token_id": "is applied here",
    r"tokenizer\.ggml\.(prefix|suffix|middle|fim_\w+)_token_id": "is for filling in the middle",
    r"tokenizer\.ggml\.(remove_extra_whitespaces|escape_whitespaces)": "is part of its vocabulary",
    r"tokenizer\.chat_template": "is read",
    r"tokenizer\.huggingface\.json": "holds the same vocabulary again",
}
_SAME_AS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "rope.freq_base": "rope_theta",
}
"""Keys of an architecture that transformers leaves to a config's defaults, and the config's name of
the same: a file is served if both say the same."""
_FREQUENCIES = "rope_freqs.weight"
_ENDS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
_SCALINGS = {"linear": ("factor",), "yarn": ("factor", "original_context_length")}


@dataclass(frozen=True, slots=True)
class GgufContents:
    """The keys and the names of tensors of a file."""

    path: Path
    keys: Mapping[str, Any]
    tensors: frozenset[str]
    frequencies: tuple[float, ...] | None
    """Divisors of the rotation's frequencies."""

    @classmethod
    def of(cls, path: Path) -> GgufContents:
        from gguf import GGUFReader

        reader = GGUFReader(path)
        long = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores"}
        keys = {
            name: None if name in long else field.contents()
            for name, field in reader.fields.items()
        }
        names = frozenset(tensor.name for tensor in reader.tensors)
        found = next((one for one in reader.tensors if one.name == _FREQUENCIES), None)
        factors = None if found is None else tuple(float(value) for value in found.data.flatten())
        return cls(path, keys, names, factors)

    def apply_to(self, config: Any) -> None:
        """Give transformers' config what it lacks of the file. Raises PairRefused for a key that
        would change what is computed and is not applied."""
        architecture = str(self.keys["general.architecture"])
        self._scale_rotation(config, architecture)
        read = _read_keys(architecture)
        for key, value in self.keys.items():
            if any(re.fullmatch(pattern, key) for pattern in _HARMLESS):
                continue
            own = key.removeprefix(f"{architecture}.")
            if own in read or own.startswith("rope.scaling."):
                continue
            known = _SAME_AS.get(own)
            if known is None or not _same(_of_config(config, known), value):
                raise PairRefused(
                    f"{self.path}: {key!r} is {value!r}, which would not be applied; without it the"
                    " model computes something else"
                )

    def _scale_rotation(self, config: Any, architecture: str) -> None:
        rope = dict(getattr(config, "rope_parameters", None) or {})
        prefix = f"{architecture}.rope.scaling."
        kind = self.keys.get(f"{prefix}type", "none")
        if kind != "none" and kind not in _SCALINGS:
            raise PairRefused(f"{self.path}: a scaling of rotations of the kind {kind!r}")
        if kind == "none" and any(key.startswith(prefix) for key in self.keys):
            unknown = sorted(key for key in self.keys if key.startswith(prefix))
            if unknown != [f"{prefix}type"]:
                raise PairRefused(f"{self.path}: {unknown[0]!r} without a kind of scaling")
        if kind in _SCALINGS:
            given = {
                key.removeprefix(prefix): value
                for key, value in self.keys.items()
                if key.startswith(prefix) and not key.endswith((".type", ".finetuned"))
            }
            if unknown := sorted(given.keys() - set(_SCALINGS[kind])):
                raise PairRefused(f"{self.path}: '{prefix}{unknown[0]}' would not be applied")
            rope |= {"rope_type": kind, "factor": float(given["factor"])}
            if kind == "yarn":
                rope["original_max_position_embeddings"] = int(given["original_context_length"])
            config.rope_parameters = rope
        if self.frequencies is None:
            return
        if kind != "none":
            raise PairRefused(f"{self.path}: {_FREQUENCIES} beside a scaling of rotations")
        factors = list(self.frequencies)
        # The kind that takes a factor for each frequency: the same for short and for long texts.
        config.rope_parameters = {
            "rope_type": "longrope",
            "rope_theta": rope["rope_theta"],
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": config.max_position_embeddings,
        }

    @property
    def ends(self) -> list[int]:
        """Ids of the tokens that end a text or a turn."""
        found = [self.keys[name] for name in _ENDS if name in self.keys]
        return list(dict.fromkeys(int(number) for number in found))

    def check_tensors(self, used: Iterable[str]) -> None:
        """Raise PairRefused for a tensor that is not among those that were used."""
        unused = sorted(self.tensors - set(used) - {_FREQUENCIES})
        if unused:
            raise PairRefused(
                f"{self.path}: {len(unused)} tensors have no place in the model, such as"
                f" {unused[0]}"
            )


def _read_keys(architecture: str) -> set[str]:
    """Keys of the architecture that transformers reads."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    spellings = {architecture, architecture.replace("-", "_")}
    spellings.add(architecture.replace("moe", "_moe"))
    return {
        key
        for name in spellings
        for key, value in GGUF_CONFIG_MAPPING.get(name, {}).items()
        if value is not None
    }


def _of_config(config: Any, name: str) -> Any:
    if name == "rope_theta":
        return (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    if name == "head_dim":
        own = getattr(config, "head_dim", None)
        return own or config.hidden_size // config.num_attention_heads
    return getattr(config, name, None)


def _same(own: Any, value: Any) -> bool:
    if isinstance(own, int | float) and isinstance(value, int | float):
        return abs(own - value) <= 1e-6 * max(1.0, abs(value))
    return bool(own == value)


def used_tensors(config: Any) -> set[str]:
    """Names of a file's tensors that transformers finds a place for in a model of this config."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    kind = config.model_type
    spelled = {kind, kind.replace("_", "-"), kind.replace("_", ""), kind.removesuffix("_text")}
    processors = [TENSOR_PROCESSORS[name] for name in sorted(spelled & TENSOR_PROCESSORS.keys())]
    processor = (processors or [TensorProcessor])[0](config=config.to_dict())
    names = set(get_gguf_hf_weights_map(model, processor))
    return names | {f"{name}.weight" for name in names}
