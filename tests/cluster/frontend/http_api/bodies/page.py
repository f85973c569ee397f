"""The page docs/parameters.md, made of the table. `python -m` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel

from cluster.frontend.http_api.bodies import ChatRequest, CompletionRequest, Detokenize, Tokenize
from cluster.frontend.http_api.bodies.messages import MessagesRequest
from cluster.frontend.http_api.bodies.parameters import PARAMETERS, TOPS, Kind, Parameter
from cluster.frontend.http_api.bodies.responses import ResponsesRequest

PAGE = Path(__file__).parents[5] / "docs" / "parameters.md"
MODELS: dict[str, type[BaseModel]] = {
    "completions": CompletionRequest,
    "chat": ChatRequest,
    "responses": ResponsesRequest,
    "anthropic": MessagesRequest,
    "tokenize": Tokenize,
    "detokenize": Detokenize,
}
"""By the word for each endpoint."""
_HEAD = (
    "# Parameters of the HTTP API\n",
    "Every name that clients of OpenAI, vLLM and SGLang send, in three kinds. The table is"
    " [parameters.py](../cluster/frontend/http_api/bodies/parameters.py);"
    " `python -m tests.cluster.frontend.http_api.bodies.page` writes this page.\n",
    "A null asks for nothing, whatever the name. An unknown name that is near a known one is"
    " refused with a question. Any other unknown name at the top, in a turn or in a tool has no"
    " effect: the answer names it in the header `x-lockstep-ignored`, and the log once a minute."
    " With `server.unknown_fields: refuse` it is refused.\n",
)


def page() -> str:
    return "\n".join([*_HEAD, *_supported(), *_without_effect(), *_refused()]) + "\n"


def _of(kind: Kind) -> list[tuple[str, Parameter]]:
    return [(name, entry) for name, entry in PARAMETERS.items() if entry.kind is kind]


def _supported() -> Iterator[str]:
    yield from ("## Supported", "", "| name | for | |", "|---|---|---|")
    for name, entry in _of(Kind.SUPPORTED):
        top, _, inner = name.partition(".")
        wanted = [word for word, model in MODELS.items() if top in model.model_fields]
        if f"{top}." in TOPS:
            wanted, name = [top], inner
        yield f"| `{name}` | {', '.join(wanted)} | {entry.about} |"


def _without_effect() -> Iterator[str]:
    yield from ("", "## Taken, without effect on the output", "")
    whys: dict[str, list[str]] = {}
    for name, entry in _of(Kind.WITHOUT_EFFECT):
        whys.setdefault(entry.about, []).append(name)
    yield from ("| names | why |", "|---|---|")
    yield from (f"| {_list(names)} | {why} |" for why, names in whys.items())


def _refused() -> Iterator[str]:
    yield from ("", "## Refused, but for values that ask for nothing", "")
    yield from ("| name | such values | instead, or why |", "|---|---|---|")
    for name, entry in _of(Kind.REFUSED):
        values = _list(json.dumps(value) for value in entry.neutral)
        yield f"| `{name}` | {values} | {entry.about} |"


def _list(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


if __name__ == "__main__":
    PAGE.write_text(page())
