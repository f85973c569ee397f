"""Converts GGUF files into directories that transformers reads fast, once for each file.

transformers takes many seconds to read a GGUF file, so what it read is kept in the user's cache
directory under the hash of the file's content. A directory appears there whole or not at all, and
one process at a time makes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from replicas.errors import PairRefused
from replicas.models.weights.gguf_contents import GgufContents, used_tensors
from replicas.names import READERS

_FORM = 2
"""Of what is kept: what an earlier form kept may lack something of a file."""
_WAIT_S_MAX = 3600.0
"""How long another process may take to convert the same file."""

_log = logging.getLogger("lockstep.replica")
_start_log = logging.getLogger("lockstep.start")
"""Its lines are shown while a server starts."""


def converted(file: Path | str, dtype: str | None) -> Path:
    """A directory with config, tokenizer and chat template of the file, for `from_pretrained`.

    With a `dtype` such as "float32" also the weights, dequantized in float32 and rounded to it.
    `file` may be `REPO:FILE` of the hub. Raises PairRefused, and OSError for a file that cannot be
    read or fetched and a cache that cannot be written.
    """
    missing = [package for package in READERS if importlib.util.find_spec(package) is None]
    if missing:
        raise PairRefused(f"{file}: to read GGUF files, pip install {' '.join(missing)}")
    if isinstance(file, str):
        from huggingface_hub import hf_hub_download

        file = Path(hf_hub_download(*file.split(":", 1)))
    stat = file.stat()
    content = _content_hash(file, stat.st_size, stat.st_mtime_ns)
    folder = cache_directory() / "gguf" / f"{content}.{_FORM}"
    text = _made_once(file, folder / "text", None)
    return text if dtype is None else _made_once(file, folder / dtype, text)


def cache_directory() -> Path:
    """Where this user's converted files are: `lockstep` in XDG_CACHE_HOME, else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


@lru_cache(maxsize=16)
def _content_hash(file: Path, size: int, mtime_ns: int) -> str:
    """Of a file that is as it was at this time."""
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise PairRefused(f"{file}: not a GGUF file")
        content.seek(0)
        return hashlib.file_digest(content, "sha256").hexdigest()


def _made_once(file: Path, made: Path, text: Path | None) -> Path:
    """`made`, with the weights and what is in `text`; without `text`, what belongs into that."""
    if made.is_dir():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    # The system lets go of a lock with its process. Another's may take long: TimeoutError.
    with WeakFileLock(made.parent / "lock", timeout=_WAIT_S_MAX):
        if made.is_dir():
            return made
        what = "config and tokenizer" if text is None else f"weights, as {made.name}"
        _log.info("%s: reading %s; the next start finds them in %s", file, what, made)
        if text is not None:
            _start_log.info("converts %s, once", file.name)
        begun_s = time.monotonic()
        part = made.with_name(f"{made.name}.part")
        # Left by a process that was killed: only the holder of the lock writes here.
        shutil.rmtree(part, ignore_errors=True)
        try:
            if text is None:
                _write_text(file, part)
            else:
                shutil.copytree(text, part)
                _write_weights(file, made.name, part)
            os.sync()  # what has its name is whole, even after a power cut
            part.rename(made)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        _log.info("%s: %s read in %.1f s", file, what, time.monotonic() - begun_s)
    return made


def _write_text(file: Path, part: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    with _refusing(file):
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, config=config)
        contents = GgufContents.of(file)
    contents.apply_to(config)
    config.save_pretrained(part)
    if ends := contents.ends:
        GenerationConfig(eos_token_id=ends).save_pretrained(part)
    tokenizer.save_pretrained(part)


def _write_weights(file: Path, dtype: str, part: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    config = AutoConfig.from_pretrained(part)  # it takes seconds to read it from the file
    with _refusing(file):
        GgufContents.of(file).check_tensors(used_tensors(config))
        model, found = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            config=config,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    if missing := sorted(found["missing_keys"]):
        # They would be random numbers.
        raise PairRefused(
            f"{file}: lacks {len(missing)} weights of the model, such as {missing[0]}"
        )
    model.save_pretrained(part)


@contextlib.contextmanager
def _refusing(file: Path) -> Iterator[None]:
    """Whatever goes wrong in reading is the file's: its readers check little."""
    try:
        yield
    except (OSError, PairRefused):
        raise
    except Exception as error:
        raise PairRefused(f"{file}: transformers cannot read it: {error}") from error
