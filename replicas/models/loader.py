"""Load one model by its name, and refuse what cannot be read.

The weights of a quantized checkpoint are dequantized in reading; nothing else knows that it was
quantized. Knows nothing of what a model is for: a target and what drafts for it are
`replicas.pair`'s.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from replicas.config import ReplicaConfig
from replicas.demo import DRAFT_DIR, HEAD_DIR, TARGET_DIR
from replicas.errors import PairRefused
from replicas.models.weights.checkpoint import read_weights, text_part
from replicas.models.weights.gguf import converted
from replicas.models.weights.packed import Packing
from replicas.models.weights.planted import plant, planted_config
from replicas.names import SMOLLM2_HEAD, TINY, gguf_file, hub_revision, is_planted, parse_planted

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
"""Of a model on the hub: all that is read. Of a draft also pickled weights: heads may have them."""


def resolve(
    name: str, role: str = "target", weights: str | None = None, field: str | None = None
) -> str:
    """The directory or hub name behind `name`, from which transformers loads.

    `REPO@REVISION` is a branch, tag or commit of a hub's model. Of a GGUF file it has config and
    tokenizer; with `weights`, the dtype to have them in, also those. Raises OSError for what can
    only be a directory or file and is none, and PairRefused for a file that cannot be read; both
    begin with `field`, the setting that names it, which is its role if it is not given.
    """
    field = field or role
    if name == TINY:
        return str(TARGET_DIR if role == "target" else DRAFT_DIR)
    if name == SMOLLM2_HEAD:
        return str(HEAD_DIR)
    try:
        if not is_planted(name) and (file := gguf_file(name)) is not None:
            return str(converted(file, weights))
    except PairRefused as error:
        raise PairRefused(f"{field}: {error}") from error
    except OSError as error:
        raise OSError(f"{field}: {error}") from error
    if name.startswith("~"):
        name = os.path.expanduser(name)
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise NotADirectoryError(f"{field}: {name!r} is no directory of this machine")
    if (found := hub_revision(name)) is not None:
        repo, revision = found
        files = [*_FILES, "*.bin"] if role == "draft" else _FILES
        return snapshot_download(repo, revision=revision, allow_patterns=files)
    return name


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one, a GPU without a number this thread's current one.

    A GPU's number is always named: torch makes no device current that has none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PairRefused(f"device: {name} was asked for, but torch sees no GPU")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def dtype_of(config: ReplicaConfig) -> torch.dtype:
    """Of weights and KV cache. A checkpoint that names none of ours counts as float32.

    Raises what reading the target's config raises.
    """
    if config.dtype == "auto" and may_be_gpu(config.device):
        whole = load_config(resolve(config.target), config, "target")
        own = getattr(whole.get_text_config(), "dtype", None)
        return own if own in (torch.bfloat16, torch.float16) else torch.float32
    dtype: torch.dtype = getattr(torch, "float32" if config.dtype == "auto" else config.dtype)
    return dtype


def dtype_name(config: ReplicaConfig) -> str:
    """As `float32`."""
    return str(dtype_of(config)).removeprefix("torch.")


def may_be_gpu(device: str) -> bool:
    """Whether a setting `device` stands for a GPU, which need not be here where it names one."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def load_config(path: str, config: ReplicaConfig, field: str) -> Any:
    """transformers' config of the model that the setting `field` names, by which `from_pretrained`
    gives plain weights. Raises PairRefused and OSError, which begin with that setting."""
    if is_planted(path):
        return planted_config(parse_planted(path))
    try:
        loaded = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except OSError as error:
        raise OSError(f"{field}: {error}") from error
    except ValueError as error:
        raise PairRefused(f"{field}: {error}") from error
    if getattr(loaded, "is_encoder_decoder", False):
        raise PairRefused(
            f"{field}: {path}: an encoder-decoder model; only decoder-only models are served"
        )
    quantization = getattr(loaded, "quantization_config", None)
    if quantization and Packing.of(quantization, f"{field}: {path}") is not None:
        del loaded.quantization_config  # what is packed is read as plain weights
    elif quantization:
        method = quantization.get("quant_method")
        of_method = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
        if of_method is None or "dequantize" not in inspect.signature(of_method).parameters:
            raise PairRefused(
                f"{field}: {path} is quantized by {method}, which transformers cannot dequantize"
            )
        loaded.quantization_config = {**quantization, "dequantize": True}
    return text_part(loaded, field, path)


def load_model(
    path: str,
    config: ReplicaConfig,
    device: torch.device,
    acceptance: float,
    field: str,
    divide: Callable[[PreTrainedModel], None] = lambda model: None,
) -> PreTrainedModel:
    """The model on `device`, of which `divide` keeps a rank's part. `acceptance`, in [0, 1]: the
    acceptance rate of planted weights. Raises what `read_model` raises."""
    if is_planted(path):
        model = plant(path, device, dtype_of(config), acceptance)
        divide(model)
        return model
    model = read_model(path, config, field)
    # Here still on the CPU: the device needs room for a part only.
    divide(model)
    return model.to(device)


def read_model(path: str, config: ReplicaConfig, field: str) -> PreTrainedModel:
    """The model on the CPU. Raises what `load_config` raises, and PairRefused where a package is
    missing that transformers needs for it, or files and model do not fit together."""
    of_model, dtype = load_config(path, config, field), dtype_of(config)
    quantized = getattr(of_model, "quantization_config", None) is not None
    trusted = config.trust_remote_code
    whole = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    in_part = type(whole) is not type(of_model)
    packing = Packing.of(getattr(whole, "quantization_config", None) or {}, path)
    try:
        model = read_weights(path, of_model, in_part, dtype, trusted, packing)
    except ImportError as error:  # a package that reads this kind of checkpoint
        raise PairRefused(f"{path}: {error}") from error
    for parameter in model.parameters() if quantized else ():
        # Weights that are not quantized there keep the dtype in which they are stored.
        parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)
