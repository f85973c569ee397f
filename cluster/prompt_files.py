"""Files of prompts: JSON lines with `prompt`, or with `turns` as in Spec-Bench, of which the first
is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class PromptsError(ValueError):
    """A prompt file that cannot be used; the message names the file and the line."""


class _Line(msgspec.Struct):
    prompt: str | None = None
    turns: list[Any] | None = None


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The first `limit` prompts of the file, all when None.

    Raises PromptsError, and OSError for a file that cannot be read.
    """
    prompts: list[str] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=_Line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PromptsError(
                f"{path}:{number}: not a JSON object with a prompt: {error}"
            ) from None
        prompt = found.turns[0] if found.prompt is None and found.turns else found.prompt
        if not (prompt and isinstance(prompt, str)):
            raise PromptsError(
                f"{path}:{number}: 'prompt', or the first of 'turns', must be a non-empty text"
            )
        prompts.append(prompt)
    if not prompts:
        raise PromptsError(f"{path}: no prompts")
    return prompts
