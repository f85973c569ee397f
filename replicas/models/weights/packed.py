"""Weights of 4 and 8 bits, as GPTQ and AWQ pack them into whole numbers, read as plain ones.

Each is unpacked when it is read, one at a time: weight = (number - zero) * scale, with the zero and
the scale of the group that its input belongs to. What is packed in another way is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from replicas.errors import PairRefused

_IN_ORDER = tuple(range(8))
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a whole number of 32 bits AWQ has each of eight columns."""
_FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
"""By the method of quantization."""
_BITS = {"gptq": (4, 8), "awq": (4,)}
_NUMBERS = ".qweight"
_BESIDE = (".qzeros", ".scales", ".g_idx")


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint's numbers are packed."""

    method: str
    bits: int
    group_size: int
    """Inputs that share a scale; -1: all."""
    zero_offset: int
    """What is added to a stored zero."""
    desc_act: bool
    """Inputs belong to groups in an order of their own."""

    @classmethod
    def of(cls, quantization: dict[str, Any], where: str) -> Packing | None:
        """Of a config's `quantization_config`; None: of another method. `where` begins an error.
        Raises PairRefused."""
        method = str(quantization.get("quant_method"))
        if method not in _FORMATS:
            return None
        default = _FORMATS[method][0]
        names = ("checkpoint_format", "format") if method == "gptq" else ("version", "format")
        named = next((quantization[name] for name in names if quantization.get(name)), default)
        bits, group_size = quantization.get("bits"), quantization.get("group_size", 128)

        def refused(setting: str, value: Any, served: Iterable[Any]) -> PairRefused:
            return PairRefused(
                f"{where} is quantized by {method} with {setting} {value!r}, of which no plain"
                f" weights are made; served: {', '.join(map(str, served))}"
            )

        if quantization.get("is_marlin_format"):
            named = "marlin"
        if quantization.get("backend") == "llm-awq":
            named = "llm-awq"
        if str(named).lower() not in _FORMATS[method]:
            raise refused("format", named, _FORMATS[method])
        if bits not in _BITS[method]:
            raise refused("bits", bits, _BITS[method])
        if type(group_size) is not int or (group_size < 1 and group_size != -1):
            raise refused("group_size", group_size, ("-1", "a positive number"))
        if any(settings for settings in (quantization.get("dynamic") or {}).values()):
            raise refused("dynamic", "settings by layer", ("the same bits and groups everywhere",))
        if method == "awq" and quantization.get("zero_point") is False:
            raise refused("zero_point", False, (True,))
        offset = 1 if method == "gptq" and str(named).lower() == "gptq" else 0
        return cls(method, bits, group_size, offset, bool(quantization.get("desc_act")))


def plain_weights(files: Iterable[Path], packing: Packing, where: str) -> dict[str, Any]:
    """All tensors of these files by name, read when they are indexed. Those of packed layers are
    one `weight` each. Raises PairRefused."""
    handles: dict[str, Any] = {}
    for file in files:
        opened: Any = safe_open(file, "pt")
        handles.update(dict.fromkeys(opened.keys(), opened))
    found: dict[str, Any] = {}
    used: set[str] = set()
    for name in handles:
        if not name.endswith(_NUMBERS):
            continue
        layer = name.removesuffix(_NUMBERS)
        if f"{layer}.weight" in handles:
            raise PairRefused(f"{where}: {layer} is stored packed and plain")
        parts = [name, *(layer + part for part in _BESIDE if layer + part in handles)]
        packed = {part.removeprefix(f"{layer}."): handles[part].get_tensor for part in parts}
        found[f"{layer}.weight"] = PackedWeight(layer, packed, packing, where)
        used.update(parts)
    # Of a layer that is not packed, and of none: a reader that knows the model says so.
    found |= {name: opened.get_slice(name) for name, opened in handles.items() if name not in used}
    return found


class PackedWeight:
    """A layer's weight, which is made anew whenever it is indexed."""

    def __init__(self, layer: str, parts: dict[str, Any], packing: Packing, where: str) -> None:
        """`parts`: what reads the tensor of a layer, by its name in the layer."""
        self._layer, self._parts, self._packing, self._where = layer, parts, packing, where
        needed = ["qzeros", "scales", *(["g_idx"] if packing.desc_act else [])]
        for name in needed:
            if name not in parts:
                raise PairRefused(f"{where}: {layer} has no {name}, which its numbers need")

    def __getitem__(self, index: Any) -> torch.Tensor:  # [out, in], float32
        weight: torch.Tensor = self._made()[index]
        return weight

    def _made(self) -> torch.Tensor:
        packing, awq = self._packing, self._packing.method == "awq"
        bits, order = packing.bits, _AWQ_ORDER if awq else _IN_ORDER
        packed, scales = self._read("qweight"), self._read("scales")
        numbers = _unpacked(packed, bits, order, 1 if awq else 0)  # [in, out]
        zeros = _unpacked(self._read("qzeros"), bits, order, 1)  # [groups, out]
        zeros = (zeros + packing.zero_offset) & ((1 << bits) - 1)
        inputs, outputs = numbers.shape
        group_size = packing.group_size if packing.group_size > 0 else inputs
        groups = torch.arange(inputs) // group_size
        if not awq and "g_idx" in self._parts and (given := self._read("g_idx")).numel():
            groups = given.long()
        if groups.shape != (inputs,) or scales.shape != (-(-inputs // group_size), outputs):
            raise self._refused("numbers and scales", "do not fit together")
        if zeros.shape != scales.shape:
            raise self._refused("zeros and scales", "do not fit together")
        if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[0]:
            raise self._refused("g_idx", "names groups that have no scale")
        weight = (numbers - zeros[groups]).float() * scales.float()[groups]
        return weight.t().contiguous()

    def _read(self, part: str) -> torch.Tensor:
        tensor: torch.Tensor = self._parts[part](f"{self._layer}.{part}")
        wanted = (torch.float16, torch.bfloat16, torch.float32) if part == "scales" else ()
        if tensor.dtype not in (wanted or (torch.int32, torch.int64)) or (
            tensor.dim() != (1 if part == "g_idx" else 2)
        ):
            raise self._refused(part, f"is {tuple(tensor.shape)} of {tensor.dtype}")
        return tensor

    def _refused(self, what: str, why: str) -> PairRefused:
        packing = self._packing
        return PairRefused(
            f"{self._where}: {self._layer}: {what} {why}, as {packing.method} with {packing.bits}"
            f" bits and group_size {packing.group_size} has them"
        )


def _unpacked(
    packed: torch.Tensor, bits: int, order: tuple[int, ...], dim: int
) -> torch.Tensor:  # with 32 / bits times as many along `dim`
    shifts = torch.tensor(order[: 32 // bits], dtype=torch.int32) * bits
    shape = [*packed.shape]
    shape[dim] *= shifts.shape[0]
    spread = packed.to(torch.int32).unsqueeze(dim + 1)
    shifts = shifts.view(-1, *(1,) * (packed.dim() - dim - 1))
    return ((spread >> shifts) & ((1 << bits) - 1)).reshape(shape)
