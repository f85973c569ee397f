"""Several processes train one head, by Ray Train: each takes its share of every batch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from cluster import own_ray
from replicas.errors import TrainingRefused
from replicas.training import FeatureFolder, Item, Start, Training, TrainSettings

CHECKPOINT = "checkpoint.pt"
_STARTS = 3
"""How often workers that end are started again, from the last checkpoint."""


def check_installed() -> None:
    """Raises TrainingRefused without what Ray Train needs."""
    try:
        import ray.train.torch  # noqa: F401
    except ImportError as error:
        raise TrainingRefused(f"workers: several need lockstep[train]: {error}") from None


def train_over_ray(
    out: Path,
    workers: int,
    settings: TrainSettings,
    start_file: Path,
    target: Any,
    features: FeatureFolder,
    items: Sequence[Item],
    use_gpu: bool,
    checkpoint_s: float,
) -> None:
    """Train to the last step, from the checkpoint in `out` if there is one; leaves the last one
    there. `target`: transformers' config. All workers must see the files of this machine.

    Raises TrainingRefused.
    """
    check_installed()
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    begun = not ray.is_initialized()
    if begun:
        if own_ray.is_there():
            own_ray.join(log_to_driver=False)
        else:
            own_ray.begin(include_dashboard=False, log_to_driver=False)
    told = {
        "settings": asdict(settings),
        "start": str(start_file),
        "target": target,
        "features": (str(features.folder), features.width),
        "items": list(items),
        "checkpoint": str((out / CHECKPOINT).resolve()),
        "checkpoint_s": checkpoint_s,
        "gpu": use_gpu,
    }
    each = {"CPU": 0 if use_gpu else 1, **({"GPU": 1} if use_gpu else {})}
    trainer = TorchTrainer(
        _worker,
        train_loop_config=told,
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=use_gpu, resources_per_worker=each
        ),
        run_config=RunConfig(
            name="head",
            storage_path=str((out / "ray").resolve()),
            failure_config=FailureConfig(max_failures=_STARTS),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    try:
        result = trainer.fit()
        if result.error is not None:
            raise TrainingRefused(f"workers: the training ended: {result.error}")
        with result.checkpoint.as_directory() as folder:
            shutil.copy(Path(folder, CHECKPOINT), out / CHECKPOINT)
    except (ray.exceptions.RayError, RuntimeError) as error:  # the second is what `fit` raises
        raise TrainingRefused(f"workers: {error}") from error
    finally:
        if begun:
            ray.shutdown()


def _worker(told: dict[str, Any]) -> None:
    """One process of the training."""
    import ray.train
    import torch
    from ray.train import Checkpoint
    from ray.train.torch import get_device

    settings = TrainSettings(**told["settings"])
    device = get_device() if told["gpu"] else torch.device("cpu")
    head = Start.read(Path(told["start"])).head(told["target"]).to(device)
    folder, width = told["features"]
    training = Training(head, FeatureFolder(Path(folder), width), told["items"], settings)
    last = ray.train.get_checkpoint()
    if last is not None:  # after a failure
        with last.as_directory() as found:
            training.load(Path(found, CHECKPOINT))
    elif Path(told["checkpoint"]).is_file():
        training.load(Path(told["checkpoint"]))
    first = ray.train.get_context().get_world_rank() == 0
    saved = begun = monotonic()
    before = training.progress.seconds
    while training.progress.step < settings.steps:
        loss = training.step()
        training.progress.seconds = before + monotonic() - begun
        # All processes report as often, so what decides is the same in all: rank 0's clock.
        due = torch.tensor(float(monotonic() - saved >= told["checkpoint_s"]), device=device)
        torch.distributed.broadcast(due, 0)
        if not bool(due) and training.progress.step < settings.steps:
            continue
        saved = monotonic()
        metrics = {"step": training.progress.step, "loss": loss}
        if first:
            with tempfile.TemporaryDirectory() as writing:
                training.save(Path(writing, CHECKPOINT))
                ray.train.report(metrics, checkpoint=Checkpoint.from_directory(writing))
        else:
            ray.train.report(metrics)
