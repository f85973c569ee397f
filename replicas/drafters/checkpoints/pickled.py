"""Reads the tensors of a `pytorch_model.bin`, as heads of the original EAGLE-3 are published.

Torch's own loader (`weights_only`) runs no code of the file, but allocates what the file asks for:
some hundred bytes are enough for terabytes. So what the pickle may name and how long it may be is
checked before; then the memory that it takes is bounded by the file's size.
"""

from __future__ import annotations

import pickletools
import zipfile
from pickle import UnpicklingError

import torch

from replicas.errors import PairRefused

_PICKLE_BYTES_MAX = 1 << 20
"""A head has some two dozen tensors, and one takes about 200 bytes besides its values."""
_STORAGES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_NAMES = {
    "collections OrderedDict",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
    *(f"torch {name}Storage" for name in _STORAGES),
}
"""What a state dict needs. None of them allocates what its arguments ask for."""
_MALFORMED = (
    *(UnpicklingError, zipfile.BadZipFile, RuntimeError, TypeError, ValueError),
    *(LookupError, AttributeError, NotImplementedError, EOFError),
)
"""What the three readers raise for bytes that make no sense."""


def read_pickled(path: str) -> dict[str, torch.Tensor]:
    """On the CPU, mapped from the file. Raises PairRefused, and OSError."""
    try:
        with zipfile.ZipFile(path) as file:
            _check(file)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _MALFORMED:  # torch's own words advise to trust it
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in found.items()
    ):
        raise PairRefused("pytorch_model.bin is no zip file of tensors alone")
    return found


def _check(file: zipfile.ZipFile) -> None:
    """Raises UnpicklingError for what `torch.save` does not write of a state dict."""
    if any(record.compress_type != zipfile.ZIP_STORED for record in file.infolist()):
        raise UnpicklingError("a compressed record")
    [pickled] = [part for part in file.infolist() if part.filename.split("/", 1)[-1] == "data.pkl"]
    if pickled.file_size > _PICKLE_BYTES_MAX:
        raise UnpicklingError("too long")
    for code, argument, _at in pickletools.genops(file.read(pickled)):
        if code.name == "GLOBAL" and argument not in _NAMES:
            raise UnpicklingError("not of a state dict")
