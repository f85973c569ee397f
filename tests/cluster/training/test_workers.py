"""Proves that two workers of Ray Train compute what one process does with twice the batch, and that
training goes on from a checkpoint of theirs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replicas.training import FeatureFolder, Start, Training, TrainSettings, divided
from tests.replicas.training.test_loop import drawn
from tests.tiny_pairs import target_model

pytest.importorskip("ray.train.torch", reason="needs lockstep[train]", exc_type=ImportError)

SETTINGS = TrainSettings(steps=5, batch_tokens=200, warmup=3, rate=3e-3)


@pytest.mark.ray
@pytest.mark.long
def test_two_workers_compute_what_one_does_with_twice_the_batch(tmp_path: Path) -> None:
    from cluster.training.workers import CHECKPOINT, train_over_ray

    target = copy.deepcopy(target_model("llama"))
    folder = drawn(tmp_path / "ids")
    features = FeatureFolder(tmp_path / "features", 3 * target.config.hidden_size)
    for _ in features.fill(folder, target, (0, 1, 2)):
        pass
    items, held_out = divided(folder)
    start = Start.of(target, 61, 48, folder, features, items, 0)
    start.write(tmp_path / "start")

    def trained(settings: TrainSettings) -> Training:
        return Training(start.head(target.config), features, items, settings)

    one = trained(replace(SETTINGS, batch_tokens=2 * SETTINGS.batch_tokens))
    one.step()
    one.save(tmp_path / CHECKPOINT)  # from which the workers go on
    for _ in range(SETTINGS.steps - 1):
        one.step()
    train_over_ray(
        tmp_path, 2, SETTINGS, tmp_path / "start", target.config, features, items, False, 1e9
    )
    two = trained(SETTINGS)
    two.load(tmp_path / CHECKPOINT)
    assert (two.progress.step, two.progress.tokens) == (one.progress.step, one.progress.tokens)
    for name, value in one.head.tensors().items():
        torch.testing.assert_close(two.head.tensors()[name], value, rtol=1e-3, atol=1e-5)
    assert two.score(held_out).loss == pytest.approx(one.score(held_out).loss, rel=1e-5)
