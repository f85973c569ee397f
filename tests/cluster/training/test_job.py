"""Proves that one call makes a head that can be served out of a target and a file of
conversations, that an interrupted run ends with the weights of an undisturbed one, and that what
cannot be trained is refused before it takes long."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.training import report
from cluster.training.job import Job, Outcome
from cluster.training.settings import JobSettings, make_room
from replicas.config import ReplicaConfig, SpeculativeConfig
from replicas.drafters import draft_source
from replicas.errors import TrainingRefused
from replicas.training import METHODS
from tests.cluster.training.targets import save_data, save_target

HEAD = "model.safetensors"


class Interrupting:
    """Ends a run as Ctrl-C does, in a phase."""

    def __init__(self, at: int | None = None, phase: str = "training") -> None:
        self.at, self.phase, self.seen = at, phase, 0

    def __call__(self, phase: str, done: int, total: int | None, said: str = "") -> None:
        if phase.startswith(self.phase):
            self.seen = done
            if done == self.at:
                raise KeyboardInterrupt


def job(settings: JobSettings, target: str, note: Interrupting | None = None) -> Job:
    config = ReplicaConfig(target=target, device="cpu", block_size=4)
    return Job(settings, config, lambda text: None, note or Interrupting())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def settings(tmp_path: Path) -> JobSettings:
    data = save_data(tmp_path / "data.jsonl")
    return JobSettings(
        tmp_path / "out", data, minutes=0.01, draft_vocab=48, cache=tmp_path / "cache"
    )


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_run_ends_with_the_head_of_an_undisturbed_one(
    settings: JobSettings, target: str, method: str
) -> None:
    settings = replace(settings, method=method)
    on = replace(settings, resume=True)
    with pytest.raises(KeyboardInterrupt):
        job(settings, target, Interrupting(at=0, phase="features")).run()
    with pytest.raises(KeyboardInterrupt):
        job(on, target, Interrupting(at=5)).run()
    with pytest.raises(TrainingRefused, match=r"^out: .*--resume"):
        job(settings, target).run()
    note = Interrupting()
    outcome = job(on, target, note).run()
    assert note.seen == outcome.plan.train.steps

    other = replace(on, out=settings.out.with_name("other"))
    other.out.mkdir()
    shutil.copy(settings.out / "plan.json", other.out)
    job(other, target).run()
    assert (other.out / HEAD).read_bytes() == (settings.out / HEAD).read_bytes()
    check_report(settings.out, job(on, target), outcome)
    with pytest.raises(TrainingRefused, match=r"^intermediate_size: the run to resume has 48, not"):
        job(replace(on, intermediate_size=32), target).run()


def check_report(out: Path, made: Job, outcome: Outcome) -> None:
    report.write_report(out, "lockstep train-drafter", made, outcome)
    head = SpeculativeConfig(method=outcome.plan.method, model=str(out))
    assert draft_source(ReplicaConfig(speculative_config=head), made.target) is not None
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "http" not in page.partition("<svg")[0], "nothing is loaded"
    assert f'"method": "{outcome.plan.method}"' in (out / "README.md").read_text()
    figures = json.loads((out / "training.json").read_text())
    assert figures["history"][-1]["step"] == outcome.plan.train.steps
    assert outcome.acceptance.steps > 0


def test_what_cannot_be_trained_is_refused(
    settings: JobSettings, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainingRefused, match=r"^draft_vocab: 9000, and the target has 64 tokens"):
        job(replace(settings, draft_vocab=9000), target).run()
    with pytest.raises(TrainingRefused, match=r"^cache_gib: 1e-07 GiB"):
        job(replace(settings, cache_gib=1e-7), target).run()
    with pytest.raises(TrainingRefused, match=r"^resume: .* has no run"):
        job(replace(settings, resume=True), target).run()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "ray.train", None)
        with pytest.raises(TrainingRefused, match=r"^workers: several need lockstep\[train\]"):
            job(replace(settings, workers=2), target).run()
    plain = save_target(tmp_path / "plain", template=None)
    with pytest.raises(TrainingRefused, match=r"no chat template.*--data"):
        job(replace(settings, data=None), plain).run()


def test_the_cache_loses_what_was_unused_longest(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "kept", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_bytes(bytes(1 << 20))
        os.utime(tmp_path / name, (number, number))
    bound = 3 / 1024  # three MiB
    assert make_room(tmp_path, tmp_path / "kept", 0, bound) == []
    assert make_room(tmp_path, tmp_path / "kept", 2 << 20, bound) == ["old"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept", "new"]
