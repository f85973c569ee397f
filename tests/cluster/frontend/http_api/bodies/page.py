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
_GENERATING = ["completions", "chat", "responses", "anthropic"]
"""The endpoints that generate text: the first ones of `MODELS`."""
_HEAD = (
    "# Parameters of the HTTP API\n",
    "This page lists every parameter that clients of OpenAI, vLLM and SGLang send:"
    " [supported](#supported), [ignored](#ignored) or [refused](#refused).\n",
    "null has the same meaning as leaving the parameter out. An unknown name that is similar to a"
    " known one is refused, and the error suggests the known name. Any other unknown name in a"
    " body, a turn or a tool is ignored: the header `x-lockstep-ignored` of the answer lists it,"
    " and the log names it once a minute. With `server.unknown_fields: refuse` it is refused.\n",
    "`python -m tests.cluster.frontend.http_api.bodies.page` writes this page from"
    " [parameters.py](../cluster/frontend/http_api/bodies/parameters.py).\n",
)


def page() -> str:
    return "\n".join([*_HEAD, *_supported(), *_without_effect(), *_refused()]) + "\n"


def _of(kind: Kind) -> list[tuple[str, Parameter]]:
    return [(name, entry) for name, entry in PARAMETERS.items() if entry.kind is kind]


def _supported() -> Iterator[str]:
    yield from ("## Supported", "", f"*all*: {', '.join(_GENERATING)}.", "")
    yield from ("| name | endpoints | meaning |", "|---|---|---|")
    for name, entry in _of(Kind.SUPPORTED):
        top, _, inner = name.partition(".")
        wanted = [word for word, model in MODELS.items() if top in model.model_fields]
        if f"{top}." in TOPS:
            wanted, name = [top], inner
        if wanted[: len(_GENERATING)] == _GENERATING:
            wanted[: len(_GENERATING)] = ["all"]
        yield f"| `{name}` | {', '.join(wanted)} | {entry.about} |"


def _without_effect() -> Iterator[str]:
    yield from ("", "## Ignored", "", "These parameters change no output.", "")
    whys: dict[str, list[str]] = {}
    for name, entry in _of(Kind.WITHOUT_EFFECT):
        whys.setdefault(entry.about, []).append(name)
    yield from ("| names | why |", "|---|---|")
    yield from (f"| {_list(names)} | {why} |" for why, names in whys.items())


def _refused() -> Iterator[str]:
    yield from ("", "## Refused", "")
    yield "These parameters would change the output. Only their neutral values are accepted."
    yield from ("", "| names | neutral values | why, or what to do instead |", "|---|---|---|")
    whys: dict[tuple[str, str], list[str]] = {}
    for name, entry in _of(Kind.REFUSED):
        values = _list(json.dumps(value) for value in entry.neutral)
        whys.setdefault((values, entry.about), []).append(name)
    yield from (f"| {_list(names)} | {values} | {why} |" for (values, why), names in whys.items())


def _list(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


if __name__ == "__main__":
    PAGE.write_text(page())
