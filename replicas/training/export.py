"""Writes a head as it is served: config.json and model.safetensors, with what the speculators
library says of its own formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

DRAFT_LEN = 4
"""Draft tokens that acceptance is measured with, and that a checkpoint proposes to other
servers where its kind has no number of its own."""


def write_head(
    folder: Path,
    settings: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    ids: torch.Tensor,  # [draft vocabulary], int64: the target's ids, rising
    target_vocab: int,
    target_name: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Into a folder, which has the new files whole or the old ones. Raises OSError."""
    known = torch.zeros(target_vocab, dtype=torch.bool)
    known[ids] = True
    stored = {name: value.detach().to(dtype).contiguous() for name, value in tensors.items()}
    if "draft_vocab_size" in settings and len(ids) < target_vocab:
        stored["d2t"] = ids - torch.arange(len(ids))
        stored["t2d"] = known
    config = {**settings, "dtype": str(dtype).removeprefix("torch.")}
    if "speculators_model_type" in settings:
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": settings.get("block_size", DRAFT_LEN),
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        config["speculators_config"] = {
            "algorithm": settings["speculators_model_type"],
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": []},
        }
    folder.mkdir(parents=True, exist_ok=True)
    writing = folder / ".writing"
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir()
    try:
        save_file(stored, writing / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder}: {error}") from error
    (writing / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in ("model.safetensors", "config.json"):
        (writing / name).replace(folder / name)
    writing.rmdir()
