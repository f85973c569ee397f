"""Reads a head's tensors, and refuses by name what does not fit its config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from replicas.drafters.eagle3.head_config import LAYER, HeadConfig, head_config
from replicas.drafters.eagle3.pickled import read_pickled
from replicas.drafters.eagle3.planted_head import PLANTED_HEAD, planted_head, planted_tensors
from replicas.errors import PairRefused
from replicas.names import map_shift

_MAPS = ("d2t", "t2d")
_IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Ends of names of what training or an older transformers has left there."""


@dataclass(frozen=True)
class Head:
    """A head as loaded."""

    config: HeadConfig
    tensors: dict[str, torch.Tensor]
    """As `HeadConfig.tensors` names them."""
    ids: torch.Tensor | None  # [vocab of the head], int64: the target's; None: the same
    shift: int | None = None
    """Of a planted head: it proposes the token before plus so many ids."""


def read_head(name: str, target: Any) -> HeadConfig:
    """Read the config of the head in a directory or on the hub, for a target of this config.

    Raises PairRefused, or OSError for a name not found.
    """
    if name == PLANTED_HEAD:
        return planted_head(target)
    file = Path(cached_file(name, "config.json"))
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PairRefused(f"config.json: no JSON: {error}") from None
    if not isinstance(said, dict):
        raise PairRefused("config.json: no object")
    return head_config(said, _read_tensors(name, values=False).keys(), target)


def _read_tensors(name: str, values: bool = True) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors on the CPU by the speculators format's names; without `values` those
    of safetensors are not read, and mean nothing."""
    file = cached_file(name, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if file is not None:
        empty = torch.empty(0)
        try:
            with safe_open(file, "pt") as opened:
                found = {
                    key: opened.get_tensor(key) if values else empty
                    for key in opened.keys()  # noqa: SIM118, no mapping
                }
        except SafetensorError as error:
            raise PairRefused(f"model.safetensors: {error}") from None
    else:
        file = cached_file(name, "pytorch_model.bin", _raise_exceptions_for_missing_entries=False)
        if file is None:
            raise PairRefused("neither model.safetensors nor pytorch_model.bin is there")
        found = read_pickled(file)
    return {
        key.replace("midlayer.", LAYER): value
        for key, value in found.items()
        if not key.endswith(_IGNORED)
    }


def load_head(name: str, config: HeadConfig, dtype: torch.dtype, device: torch.device) -> Head:
    """Raises PairRefused with the tensors' names."""
    if name == PLANTED_HEAD:
        tensors = planted_tensors(config, dtype, device)
        return Head(config, tensors, None, map_shift(config.target_vocab))
    found = _read_tensors(name)
    maps = {key: found.pop(key) for key in _MAPS if key in found}
    shapes = config.tensors
    wrong = [f"{key} is missing" for key in shapes.keys() - found.keys()]
    wrong += [f"{key} is not known" for key in found.keys() - shapes.keys()]
    wrong += [
        f"{key} is {list(found[key].shape)}, not {list(shape)}"
        for key, shape in shapes.items()
        if key in found and tuple(found[key].shape) != shape
    ]
    if wrong:
        raise PairRefused("; ".join(sorted(wrong)))
    return Head(
        config,
        {key: value.to(device, dtype) for key, value in found.items()},
        _ids(config, maps, device),
    )


def _ids(
    config: HeadConfig, maps: dict[str, torch.Tensor], device: torch.device
) -> torch.Tensor | None:
    """The target's id of each of the head's; `d2t` holds the difference."""
    vocab, target_vocab = config.vocab_size, config.target_vocab
    if "d2t" not in maps:
        if vocab != target_vocab:
            raise PairRefused(f"d2t is missing: the head has {vocab} tokens of {target_vocab}")
        return None
    if tuple(maps["d2t"].shape) != (vocab,):
        raise PairRefused(f"d2t is {list(maps['d2t'].shape)}, not {[vocab]}")
    ids = torch.arange(vocab) + maps["d2t"].to(torch.int64)
    if not bool(((ids >= 0) & (ids < target_vocab)).all()):
        raise PairRefused(f"d2t leads beyond the target's {target_vocab} tokens")
    known = maps.get("t2d")
    if known is not None:
        marked = torch.zeros(target_vocab, dtype=torch.bool)
        marked[ids] = True
        if not torch.equal(known.to(torch.bool), marked):
            raise PairRefused("t2d does not mark the tokens that d2t leads to")
    return ids.to(device)
