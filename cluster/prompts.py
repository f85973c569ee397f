"""Prompt files: JSON lines with `prompt`, or with `turns` as in Spec-Bench (the first is taken)."""

from __future__ import annotations

import json
from pathlib import Path


class PromptsError(ValueError):
    """A prompt file that cannot be used; the message names the line."""


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The first `limit` prompts of the file, all when None.

    Raises PromptsError, and OSError for a file that cannot be read.
    """
    prompts: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            prompts.append(_prompt(line, f"{path}:{number}"))
    if not prompts:
        raise PromptsError(f"{path}: no prompts")
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptsError(f"{where}: not JSON: {error.msg}") from None
    if not isinstance(data, dict):
        raise PromptsError(f"{where}: expected an object")
    prompt = data.get("prompt")
    if prompt is None:
        turns = data.get("turns")
        prompt = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(prompt, str) or not prompt:
        raise PromptsError(f"{where}: expected a text in 'prompt' or in 'turns'")
    return prompt
