"""Files of prompts: JSON lines with `prompt`, or with `turns` as in Spec-Bench, of which the first
is taken."""

from __future__ import annotations

import json
from pathlib import Path


class PromptsError(ValueError):
    """A prompt file that cannot be used; the message names the file and the line."""


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The first `limit` prompts of the file, all when None.

    Raises PromptsError, and OSError for a file that cannot be read.
    """
    prompts: list[str] = []
    # Not splitlines: a JSON string may hold other ends of lines, such as U+2028, as they are.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            prompts.append(_prompt(line, f"{path}:{number}"))
    if not prompts:
        raise PromptsError(f"{path}: no prompts")
    return prompts


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise PromptsError(f"{path}:{number}: not UTF-8: {error.reason}") from None


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
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        lone = ord(prompt[error.start])
        raise PromptsError(f"{where}: \\u{lone:04x} is half a character") from None
    return prompt
