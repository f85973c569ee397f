"""What this server says of its own HTTP API: an OpenAPI document, and a page that shows it.

The bodies are those of the models that check requests, so both say what is taken.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from cluster import lockstep_version
from cluster.frontend.http_api.bodies.chat import ChatRequest
from cluster.frontend.http_api.bodies.check import Known
from cluster.frontend.http_api.bodies.completions import CompletionRequest
from cluster.frontend.http_api.bodies.messages import CountTokens, MessagesRequest
from cluster.frontend.http_api.bodies.parameters import PARAMETERS
from cluster.frontend.http_api.bodies.responses import ResponsesRequest
from cluster.frontend.http_api.bodies.tokens import Detokenize, Tokenize

BODIES: Mapping[str, tuple[type[Known], str]] = {
    "/v1/completions": (CompletionRequest, "Goes on with a text"),
    "/v1/chat/completions": (ChatRequest, "Answers a conversation"),
    "/v1/responses": (ResponsesRequest, "Answers a conversation, by OpenAI's newer API"),
    "/v1/messages": (MessagesRequest, "Answers a conversation, by Anthropic's API"),
    "/v1/messages/count_tokens": (CountTokens, "The number of a conversation's tokens"),
    "/tokenize": (Tokenize, "The tokens of a text or a conversation"),
    "/detokenize": (Detokenize, "The text of tokens"),
}
"""By the path to which they are sent."""
_READ: Mapping[str, str] = {
    "/v1/models": "The model that is served",
    "/load": "Requests in flight in this frontend",
    "/health": "Whether a replica is ready",
    "/ping": "Whether a replica is ready",
    "/version": "Of this server",
}
_SCHEMAS = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "status"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "status": {"type": "string", "description": "gRPC's name of it"},
            },
        }
    },
}


def document(root_path: str = "") -> dict[str, Any]:
    """The OpenAPI document. `root_path`: before every path."""
    models = [(model, "validation") for model, _ in BODIES.values()]
    _, schemas = models_json_schema(models, ref_template=_SCHEMAS + "{model}")  # type: ignore[arg-type]
    for model, _ in BODIES.values():
        for name, field in schemas["$defs"][model.__name__]["properties"].items():
            own = PARAMETERS.get(model.place + name, PARAMETERS.get(name))
            assert own is not None, name
            field["description"] = own.about
    error = {"description": "refused", "content": _json({"$ref": _SCHEMAS + "Error"})}
    answers = {"default": error}
    paths: dict[str, Any] = {
        path: {"get": {"summary": said, "responses": {"200": {"description": "told"}} | answers}}
        for path, said in _READ.items()
    }
    for path, (model, said) in BODIES.items():
        content: dict[str, Any] = _json({"type": "object"})
        if "stream" in model.model_fields:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "summary": said,
                "requestBody": {
                    "required": True,
                    "content": _json({"$ref": _SCHEMAS + model.__name__}),
                },
                "responses": {"200": {"description": "answered", "content": content}} | answers,
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lockstep", "version": lockstep_version()},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR}},
    }


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def page(described: Mapping[str, Any]) -> str:
    """The document for people. It loads nothing from elsewhere."""
    parts = ["<!doctype html><meta charset=utf-8><title>Lockstep's HTTP API</title>"]
    parts.append("<h1>Lockstep's HTTP API</h1><p><a href=openapi.json>openapi.json</a></p>")
    for path, methods in described["paths"].items():
        [(method, said)] = methods.items()
        parts.append(f"<h2>{method.upper()} {path}</h2><p>{html.escape(said['summary'])}</p>")
        if path in BODIES:
            fields = described["components"]["schemas"][BODIES[path][0].__name__]["properties"]
            rows = [
                f"<tr><td><code>{name}</code><td>{html.escape(field['description'])}"
                for name, field in fields.items()
            ]
            parts.append(f"<table>{''.join(rows)}</table>")
    return "".join(parts)
