"""The application with replicas that load no model, as a Serve config file names it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ray.serve import Application

from cluster.app import build_app
from cluster.config_sources import from_args
from cluster.frontend.target_text import TargetText
from replicas.config import ReplicaConfig
from tests.cluster.fakes import FakeReplica, load_fake_text

START_S = 3.0
"""What a replica takes to load; more than the grace of those that go."""


def load(config: ReplicaConfig) -> FakeReplica:
    """One whose target is named `broken` cannot be loaded."""
    time.sleep(START_S)
    if config.target == "broken":
        raise OSError("no such model")
    return FakeReplica(step_s=0.02, prefill_s=0.02, name=config.target)


class LightText(TargetText):
    """Of a frontend that is asked for no structure: it loads nothing for them."""

    grammars = None


def load_text(config: ReplicaConfig) -> LightText:
    text = load_fake_text(config)
    return LightText(text.tokenizer, text.eos_token_ids, text.context_len, text.encoder)


def build(args: Mapping[str, Any]) -> Application:
    return build_app(from_args(args), load, load_text)
