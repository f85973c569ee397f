"""Reading a checkpoint with transformers, which dequantizes the weights of a quantized one.

What is served, and what output is compared with, is the dequantized model; nothing else knows that
it was quantized.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from replicas.models.names import ModelRefused


def read_config(path: str, trust_remote_code: bool) -> Any:
    """transformers' config of a model, by which `from_pretrained` gives plain weights.

    Raises what `AutoConfig` raises, and ModelRefused for a checkpoint of a method that transformers
    cannot dequantize in reading.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method")
        of_method = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
        if of_method is None or "dequantize" not in inspect.signature(of_method).parameters:
            raise ModelRefused(
                f"{path} is quantized by {method}, of which transformers reads no plain weights"
            )
        config.quantization_config = {**quantization, "dequantize": True}
    return config


def read_model(
    path: str, trust_remote_code: bool, dtype: torch.dtype, attention: str | None = None
) -> PreTrainedModel:
    """The model on the CPU, its weights in `dtype`. Raises what `read_config` raises, and
    ModelRefused where a package is missing that transformers needs for it."""
    config = read_config(path, trust_remote_code)
    quantized = hasattr(config, "quantization_config")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
        )
    except ImportError as error:  # a package that reads this kind of checkpoint
        raise ModelRefused(f"{path}: {error}") from error
    for parameter in model.parameters() if quantized else ():
        # Weights that are not quantized there keep the dtype in which they are stored.
        parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)
