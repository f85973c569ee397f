"""Lockstep in Python: `LLM` runs a model in this process, `Client` asks a server by gRPC."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.client import AsyncClient, Client
    from cluster.local.llm import LLM, Completion, PromptFailed, SamplingParams

__all__ = ["LLM", "AsyncClient", "Client", "Completion", "PromptFailed", "SamplingParams"]

_CLIENTS = ("AsyncClient", "Client")


def __getattr__(name: str) -> Any:
    """Imported when it is first asked for: a client needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    home = "cluster.client" if name in _CLIENTS else "cluster.local.llm"
    return getattr(import_module(home), name)
