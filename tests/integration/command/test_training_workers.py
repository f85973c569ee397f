"""Proves that two workers of Ray Train compute what one process does with twice the batch, and that
they go on from a checkpoint of one."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.training.workers import CHECKPOINT, train_over_ray
from replicas.training import (
    METHODS,
    ConversationFolder,
    FeatureFolder,
    Start,
    Training,
    TrainSettings,
    divided,
)
from tests.replicas.training.test_loop import drawn
from tests.tiny_pairs import target_model

pytest.importorskip("ray.train.torch", reason="needs lockstep[train]", exc_type=ImportError)

SETTINGS = TrainSettings(steps=5, batch_tokens=200, warmup=3, rate=3e-3)
LAYERS = (0, 1, 2)


def prepared(root: Path) -> tuple[Start, FeatureFolder]:
    target = copy.deepcopy(target_model("llama"))
    folder = drawn(root / "ids")
    features = FeatureFolder(root / "features", len(LAYERS) * target.config.hidden_size)
    for _ in features.fill(folder, target, LAYERS):
        pass
    start = Start.of(METHODS["eagle3"], target, 61, 48, folder, features, divided(folder)[0], 0)
    start.write(root / "start")
    return start, features


def train(root: Path) -> None:
    """What the process does that starts a Ray."""
    config = target_model("llama").config
    features = FeatureFolder(root / "features", len(LAYERS) * config.hidden_size)
    items, _ = divided(ConversationFolder(root / "ids"))
    train_over_ray(root, 2, SETTINGS, root / "start", config, features, items, False, 1e9)


@pytest.mark.ray
@pytest.mark.long
def test_two_workers_compute_what_one_does_with_twice_the_batch(tmp_path: Path) -> None:
    start, features = prepared(tmp_path)
    items, held_out = divided(ConversationFolder(tmp_path / "ids"))
    config = target_model("llama").config

    def trained(settings: TrainSettings) -> Training:
        return Training(start.head(config), features, items, settings)

    one = trained(replace(SETTINGS, batch_tokens=2 * SETTINGS.batch_tokens))
    one.step()
    one.save(tmp_path / CHECKPOINT)  # from which the workers go on
    for _ in range(SETTINGS.steps - 1):
        one.step()
    # A Ray of its own, beside the one of other tests.
    call = f"from {__name__} import *; train(Path({str(tmp_path)!r}))"
    environment = {**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", call], env=environment, check=True, timeout=600)
    two = trained(SETTINGS)
    two.load(tmp_path / CHECKPOINT)
    assert (two.progress.step, two.progress.tokens) == (one.progress.step, one.progress.tokens)
    for name, value in one.head.tensors().items():
        torch.testing.assert_close(two.head.tensors()[name], value, rtol=1e-3, atol=1e-5)
    assert two.score(held_out).loss == pytest.approx(one.score(held_out).loss, rel=1e-5)
