"""Lockstep in Python: `LLM` runs a model in this process, `Client` asks a server by gRPC."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.client import AsyncClient, Client
    from cluster.local.llm import LLM, Completion, PromptFailed, SamplingParams

__all__ = ["LLM", "AsyncClient", "Client", "Completion", "PromptFailed", "SamplingParams"]

_HOMES = {
    "AsyncClient": "cluster.client",
    "Client": "cluster.client",
    "Completion": "cluster.local.llm",
    "LLM": "cluster.local.llm",
    "PromptFailed": "cluster.local.llm",
    "SamplingParams": "cluster.local.llm",
}


def __getattr__(name: str) -> Any:
    """Imported when it is first asked for: a client needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
