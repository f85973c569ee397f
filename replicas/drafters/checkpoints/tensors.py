"""Reads a head's config and tensors, and refuses by name what does not fit.

A head may draft from fewer tokens than the target has. Then `d2t` holds, for each of its own ids,
the difference to the target's id, and `t2d` may mark these.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from replicas.drafters.checkpoints.pickled import read_pickled
from replicas.errors import PairRefused

_MAPS = ("d2t", "t2d")
_IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Ends of names of what training or an older transformers has left there."""


def read_config(name: str) -> dict[str, Any]:
    """`config.json` of a directory or on the hub. Raises PairRefused, or OSError for a name not
    found."""
    file = Path(cached_file(name, "config.json"))
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PairRefused(f"config.json: not JSON: {error}") from None
    if not isinstance(said, dict):
        raise PairRefused("config.json: not a JSON object")
    return said


def tensor_names(name: str) -> Collection[str]:
    """What the checkpoint holds. Values of safetensors are not read."""
    return _read(name, values=False).keys()


def load_tensors(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    vocab: int,
    target_vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    renamed: Mapping[str, str] | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """The tensors of these names and shapes, and the target's id of each of the head's `vocab`
    tokens, [vocab], int64; None: the same. `renamed`: parts of the checkpoint's own names.

    Raises PairRefused with the tensors' names.
    """
    found = _read(name)
    for old, new in (renamed or {}).items():
        found = {key.replace(old, new): value for key, value in found.items()}
    maps = {key: found.pop(key) for key in _MAPS if key in found}
    wrong = [f"{key} is missing" for key in shapes.keys() - found.keys()]
    wrong += [f"{key} is not known" for key in found.keys() - shapes.keys()]
    wrong += [
        f"{key} is {list(found[key].shape)}, not {list(shape)}"
        for key, shape in shapes.items()
        if key in found and tuple(found[key].shape) != shape
    ]
    if wrong:
        raise PairRefused("; ".join(sorted(wrong)))
    tensors = {key: value.to(device, dtype) for key, value in found.items()}
    return tensors, _ids(maps, vocab, target_vocab, device)


def no_storage(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Tensors of sizes alone."""
    return {key: torch.empty(size, dtype=dtype, device="meta") for key, size in shapes.items()}


def _read(name: str, values: bool = True) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors on the CPU; without `values` those of safetensors are not read, and
    mean nothing."""
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
            raise PairRefused("has neither model.safetensors nor pytorch_model.bin")
        found = read_pickled(file)
    return {key: value for key, value in found.items() if not key.endswith(_IGNORED)}


def _ids(
    maps: dict[str, torch.Tensor], vocab: int, target_vocab: int, device: torch.device
) -> torch.Tensor | None:
    """The target's id of each of the head's."""
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


def layer_tensors(
    layer: str, width: int, queries: int, keys: int, inner: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder layer's weights, as Llama has them, behind the prefix `layer`;
    `queries` and `keys`: the width of all heads."""
    attention, mlp = layer + "self_attn.", layer + "mlp."
    return {
        layer + "input_layernorm.weight": (width,),
        layer + "post_attention_layernorm.weight": (width,),
        attention + "q_proj.weight": (queries, width),
        attention + "k_proj.weight": (keys, width),
        attention + "v_proj.weight": (keys, width),
        attention + "o_proj.weight": (width, queries),
        mlp + "gate_proj.weight": (inner, width),
        mlp + "up_proj.weight": (inner, width),
        mlp + "down_proj.weight": (width, inner),
    }
