"""Reads the weights of a directory or a hub's model whole: each tensor has its place in the model,
each weight of the model is in the files.

Of a model that sees or hears, its part for text is read. What a checkpoint may hold beside that
stands here with the reason; any other tensor, and a missing one, is refused by name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from replicas.errors import PairRefused
from replicas.models.weights.packed import Packing, plain_weights

_HARMLESS = {
    r".*\.inv_freq": "follows from the config",
    r".*\.(attn|attention)\.(bias|masked_bias)": "is a mask of the positions before",
    r"(model\.)?(vision|visual|audio|image|embed_vision|embed_audio)\w*\..*": "sees or hears",
    r"(model\.)?(multi_modal|mm)_?projector\..*": "is for images",
    r"(model\.)?(mtp|talker|token2wav|code2wav)\..*": "drafts, or speaks",
    r".*\.(k|v|q|kv)_scale": "scales a quantized cache, which is none here",
    r".*\.(input|activation)_scale": "scales quantized activations, which are none here",
}
"""Tensors that a model leaves in a checkpoint without computing something else for it."""
_TEXT_KEYS = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}
"""Names of a text model's weights within a checkpoint for more than text."""

_log = logging.getLogger("lockstep.replica")


def text_part(config: Any, field: str, path: str) -> Any:
    """The config of the part for text, where a model takes more than text."""
    text = config.get_text_config(decoder=True)
    if text is config:
        return config
    for name in ("quantization_config", "dtype"):
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    if type(text) not in AutoModelForCausalLM._model_mapping:
        raise PairRefused(
            f"{field}: {path}: {config.model_type} takes more than text, and its part for text is"
            " no model of its own"
        )
    _log.info("%s: of %s the part for text is served", path, config.model_type)
    return text


def read_weights(
    path: str,
    config: Any,
    in_part: bool,
    dtype: torch.dtype,
    trust_remote_code: bool,
    packing: Packing | None = None,
) -> PreTrainedModel:
    """The model of a config with the weights of these files; `in_part`: it is the part for text.
    Raises PairRefused for a tensor without a place, and a weight that is not there or has another
    shape."""
    options: dict[str, Any] = {"dtype": dtype, "config": config}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if in_part:
        options["key_mapping"] = _TEXT_KEYS
    if packing is None:
        options |= {"use_safetensors": True, "trust_remote_code": trust_remote_code}
        model, found = AutoModelForCausalLM.from_pretrained(path, **options)
    else:
        weights = plain_weights(_weight_files(path), packing, path)
        model, found = _class_of(config, path).from_pretrained(None, state_dict=weights, **options)
    if missing := sorted(found["missing_keys"]):
        raise PairRefused(
            f"{path}: lacks {len(missing)} weights of the model, such as {missing[0]}"
        )
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        raise PairRefused(
            f"{path}: {name} has shape {tuple(stored)}, the model expects {tuple(wanted)};"
            " does the config.json belong to these weights?"
        )
    patterns = [re.compile(pattern) for pattern in _HARMLESS]
    unused = sorted(
        name
        for name in found["unexpected_keys"]
        if not any(pattern.fullmatch(name) for pattern in patterns)
    )
    if unused:
        raise PairRefused(
            f"{path}: {len(unused)} tensors have no place in the model, such as {unused[0]};"
            " does the config.json belong to these weights?"
        )
    _check_tied(path, model)
    return model


def _class_of(config: Any, path: str) -> Any:
    """Raises PairRefused for code that comes with the checkpoint."""
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise PairRefused(f"{path}: a quantized model with code of its own is not served")
    made = AutoModelForCausalLM._model_mapping[type(config)]
    with torch.device("meta"):
        transposed = any(isinstance(module, Conv1D) for module in made(config).modules())
    if transposed:
        raise PairRefused(
            f"{path}: {made.__name__} stores its weights transposed; their packed form is not read"
        )
    return made


def _check_tied(path: str, model: PreTrainedModel) -> None:
    """Raise PairRefused where weights that the model ties are stored with different values."""
    # transformers unties what differs, so its own list of what it has tied does not tell.
    ties = model.config.tie_word_embeddings
    tied: dict[str, str] = dict(model._tied_weights_keys or {}) if ties else {}
    stored: dict[str, torch.Tensor] = {}
    wanted = {*tied, *tied.values()}
    if not tied:
        return
    for file in _weight_files(path):
        with safe_open(file, "pt") as opened:
            for name in wanted & set(opened.keys()):
                stored[name] = opened.get_tensor(name)
    for name, other in tied.items():
        one, two = stored.get(name), stored.get(other)
        if one is not None and two is not None and not torch.equal(one, two):
            raise PairRefused(
                f"{path}: {name} and {other} are one weight to the model, but are stored with"
                " different values; is tie_word_embeddings in config.json right?"
            )


def _weight_files(path: str) -> Iterator[Path]:
    """Those that transformers reads; one that it does not know is read where it is the only one."""
    folder = Path(path)
    if not folder.is_dir():
        patterns = ["model*.safetensors", "*.index.json"]
        folder = Path(snapshot_download(path, allow_patterns=patterns))
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file() and not whole.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        yield from (folder / name for name in sorted(set(names)))
    else:
        yield from [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
