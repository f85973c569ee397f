"""Sizes of well-known models, for pairs of random weights, and the names by which they are asked.

A planted model is named `planted:SHAPE`, where SHAPE is one of `SHAPES` or a directory with a
transformers `config.json`, and may carry settings: `planted:qwen3-8b?acceptance=0.7&layers=12`.

Knows nothing of weights: it needs neither torch nor transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

PLANTED = "planted:"

ACCEPTANCE = 0.7
"""What a planted target is made for unless its name says otherwise."""


def _shape(
    family: dict[str, Any], hidden: int, intermediate: int, layers: int, heads: int
) -> dict[str, Any]:
    return family | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
}
_GLM4 = {
    "model_type": "glm4",
    "vocab_size": 151_552,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "attention_bias": True,
}
_VICUNA = {"model_type": "llama", "vocab_size": 32_000, "max_position_embeddings": 4096}
_TINY = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_QWEN3_06B = _shape(_QWEN3, 1024, 3072, 28, 16)

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _shape(_QWEN3, 4096, 12_288, 36, 32),
    "qwen3-0.6b": _QWEN3_06B,
    "glm4-9b": _shape(_GLM4, 4096, 13_696, 40, 32),
    # No draft of this family is as widely known: the sizes of Qwen3-0.6B with GLM-4's vocabulary.
    "glm4-0.6b": {**_QWEN3_06B, "vocab_size": 151_552, "max_position_embeddings": 32_768},
    "vicuna-7b": _shape(_VICUNA, 4096, 11_008, 32, 32),
    "vicuna-68m": _shape(_VICUNA, 768, 3072, 2, 12),
    "tiny": _shape(_TINY, 64, 96, 6, 4),
    "tiny-draft": _shape(_TINY, 32, 48, 1, 4),
}
"""Arguments of transformers' config classes, `model_type` beside them."""

DRAFTS = {
    "qwen3-8b": "qwen3-0.6b",
    "glm4-9b": "glm4-0.6b",
    "vicuna-7b": "vicuna-68m",
    "tiny": "tiny-draft",
}
"""The usual draft of a target's shape."""


class BadPlantedName(ValueError):
    """A name that begins with `planted:` and names no model; the message says what is wrong."""


@dataclass(frozen=True)
class PlantedName:
    """A planted model's name, taken apart."""

    shape: str
    acceptance: float | None = None
    """Share of tokens at which the model follows the planted map; None: the role's default."""
    seed: int = 0
    layers: int | None = None
    """Another depth than the shape's."""
    scale: float | None = None
    """The embedding's scale, as an earlier calibration found it; None: calibrate."""


def map_shift(vocab: int) -> int:
    """Ids from a token to its follower: near the golden section and without a common divisor with
    the vocabulary, so that the map runs through all tokens before it repeats one."""
    shift = max(1, int(vocab * 0.381966))
    while math.gcd(shift, vocab) != 1:
        shift += 1
    return shift


def is_planted(name: str) -> bool:
    return name.startswith(PLANTED)


def parse_planted(name: str) -> PlantedName:
    """Take a name apart; raises BadPlantedName."""
    shape, _, settings = name.removeprefix(PLANTED).partition("?")
    if shape not in SHAPES and not Path(shape, "config.json").is_file():
        raise BadPlantedName(
            f"{name}: {shape!r} is neither a directory with a config.json nor one of"
            f" {', '.join(SHAPES)}"
        )
    known = {field.name for field in fields(PlantedName)} - {"shape"}
    given: dict[str, Any] = {}
    for key, value in parse_qsl(settings, keep_blank_values=True):
        if key not in known:
            raise BadPlantedName(f"{name}: {key!r} is none of {', '.join(sorted(known))}")
        try:
            given[key] = int(value) if key in ("seed", "layers") else float(value)
        except ValueError:
            raise BadPlantedName(f"{name}: {key} is no number: {value!r}") from None
    parsed = PlantedName(shape, **given)
    if parsed.acceptance is not None and not 0.0 <= parsed.acceptance <= 1.0:
        raise BadPlantedName(f"{name}: acceptance lies between 0 and 1")
    if parsed.layers is not None and parsed.layers < 1:
        raise BadPlantedName(f"{name}: layers is at least 1")
    if parsed.seed < 0:
        raise BadPlantedName(f"{name}: seed is at least 0")
    if parsed.scale is not None and not 0.0 < parsed.scale < float("inf"):
        raise BadPlantedName(f"{name}: scale is positive")
    return parsed
