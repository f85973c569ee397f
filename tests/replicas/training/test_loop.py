"""Proves that training can be interrupted and divided: what goes on from a checkpoint is, bit for
bit, what an undisturbed run has, and two processes compute what one does with the whole batch."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from replicas.errors import TrainingRefused
from replicas.training.batches import divided, epoch_batches
from replicas.training.conversations import Conversation, ConversationFolder, DrawCounts
from replicas.training.features import FeatureFolder
from replicas.training.loop import Training, TrainSettings
from replicas.training.methods import METHODS
from replicas.training.start import Start
from tests.tiny_pairs import VOCAB, target_model

SETTINGS = TrainSettings(steps=14, batch_tokens=200, warmup=3, rate=3e-3)


def drawn(folder: Path, count: int = 60) -> ConversationFolder:
    """Conversations of random tokens, in parts."""
    rng, made = Random(0), ConversationFolder(folder)
    counts = DrawCounts()
    for _ in range(3):
        some = []
        for _ in range(count // 3):
            length = rng.randrange(12, 40)
            ids = tuple(rng.choices(range(VOCAB), k=length))
            some.append(Conversation(ids, rng.randrange(3, length - 4)))
            counts.kept += 1
            counts.tokens += length
        made.append(some, counts)
    return made


def training(
    root: Path, settings: TrainSettings = SETTINGS, method: str = "eagle3", vocab: int = 61
) -> Training:
    target, kind = copy.deepcopy(target_model("llama")), METHODS[method]
    layers = kind.aux_layers(target.config.num_hidden_layers)
    folder = ConversationFolder(root / "ids")
    if not folder.parts:
        drawn(root / "ids")
    name = "features-" + "-".join(map(str, layers))
    features = FeatureFolder(root / name, len(layers) * target.config.hidden_size)
    for _ in features.fill(folder, target, layers):
        pass
    items, _ = divided(folder)
    start = Start.of(kind, target, vocab, 48, folder, features, items, 0)
    head = start.head(target.config)
    return Training(head, features, items, replace(settings, unroll=kind.unroll))


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    training(tmp_path, method="clover").save(path)
    with pytest.raises(TrainingRefused, match=r"^resume: .*checkpoint does not fit this run: "):
        training(tmp_path).load(path)
    for broken in (b"", b"no checkpoint", path.read_bytes()[:5000]):
        path.write_bytes(broken)
        with pytest.raises(TrainingRefused, match=r"^resume: .*checkpoint does not fit this run: "):
            training(tmp_path).load(path)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_from_a_checkpoint_has_the_weights_of_an_undisturbed_one(
    tmp_path: Path, method: str
) -> None:
    whole = training(tmp_path, method=method)
    losses = [whole.step() for _ in range(SETTINGS.steps)]
    assert losses[-1] < losses[0]
    assert whole.progress.epoch > 0, "it goes through an epoch's end"
    for at in (1, 6, 7, 13):
        first = training(tmp_path, method=method)
        before = [first.step() for _ in range(at)]
        first.save(tmp_path / "checkpoint")
        first.step()  # lost
        second = training(tmp_path, method=method)
        second.load(tmp_path / "checkpoint")
        after = [second.step() for _ in range(SETTINGS.steps - at)]
        assert before + after == losses
        for name, value in whole.head.tensors().items():
            assert torch.equal(value, second.head.tensors()[name]), name


def test_an_epoch_has_each_conversation_once_and_no_held_out_one(tmp_path: Path) -> None:
    train, held_out = divided(drawn(tmp_path))
    assert held_out
    for epoch in range(3):
        batches = epoch_batches(train, 200, 0, epoch)
        assert sorted(map(str, (item for batch in batches for item in batch))) == sorted(
            map(str, train)
        )
        assert all(sum(item.length for item in batch) <= 200 for batch in batches)
    assert epoch_batches(train, 200, 0, 0) != epoch_batches(train, 200, 0, 1)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_compute_what_one_does_with_twice_the_batch(
    tmp_path: Path, method: str
) -> None:
    doubled = replace(SETTINGS, batch_tokens=2 * SETTINGS.batch_tokens)
    one = training(tmp_path, doubled, method)
    expected = [one.step() for _ in range(6)]
    mp.spawn(_worker, (str(tmp_path), method), nprocs=2)
    found = [torch.load(tmp_path / f"of {rank}") for rank in range(2)]
    for losses, _ in found:
        assert losses == pytest.approx(expected, rel=1e-5)
    (_, first), (_, second) = found
    assert all(torch.equal(first[name], second[name]) for name in first)


def _worker(rank: int, root: str, method: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{root}/meeting", rank=rank, world_size=2)
    try:
        made = training(Path(root), method=method)
        losses = [made.step() for _ in range(6)]
        torch.save((losses, made.head.tensors()), Path(root) / f"of {rank}")
    finally:
        dist.destroy_process_group()
