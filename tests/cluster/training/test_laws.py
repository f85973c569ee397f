"""Proves that the laws' sentences say what the fits found, and that heads of several capacities are
measured after several token counts, once each."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.training.job import Job
from cluster.training.laws import CAPACITIES, SHARES, laws_of, measure_laws, shares_of
from cluster.training.settings import JobSettings
from replicas.config import ReplicaConfig
from replicas.errors import TrainingRefused
from replicas.training import DRAFT_LEN, Point
from tests.cluster.training.targets import save_data, save_target


def test_the_sentences_say_what_the_fits_found() -> None:
    points = [
        Point(n, p, 0.2 * math.log2(n) - 0.05 * math.log2(p))
        for n in (1000, 2000, 4000, 8000)
        for p in (10, 20, 40)
    ]
    laws = laws_of(points, [(rows, 1.5 - 0.1 * math.log2(rows)) for rows in (1, 2, 4, 8)], None)
    said = "\n".join(laws.said)
    assert "twice the tokens: +0.200 (+-0.000) accepted tokens" in said
    assert "twice the parameters: -0.050 (+-0.000) accepted tokens" in said
    assert "twice the batch: -0.100 of the gain over no drafts, R2 1.000" in said
    assert laws.by_parameters.doubled("parameters")[0] == pytest.approx(-0.05)


@pytest.mark.parametrize("accepted", [0.0, 0.4, 1.3, 3.9])
def test_equal_chances_give_the_accepted_tokens(accepted: float) -> None:
    chances = shares_of(accepted)
    whole = sum(math.prod(chances[: length + 1]) for length in range(DRAFT_LEN))
    assert whole == pytest.approx(accepted, abs=1e-6)


@pytest.mark.slow
def test_each_capacity_is_measured_after_each_token_count_once(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    data = save_data(tmp_path / "data.jsonl")
    out, cache = tmp_path / "out", tmp_path / "cache"
    settings = JobSettings(out, data, draft_vocab=48, cache=cache)
    lines: list[str] = []

    def job(settings: JobSettings) -> Job:
        config = ReplicaConfig(target=target, device="cpu", block_size=4)
        return Job(settings, config, lines.append, lambda *_: None)

    laws = measure_laws(job(settings), 0.01)
    assert len(laws.points) == len(CAPACITIES) * len(SHARES)
    assert len({point.parameters for point in laws.points}) == len(CAPACITIES)
    assert len({point.tokens for point in laws.points}) == len(SHARES)
    drawn = (out / "laws.svg").read_text()
    assert all(
        f"{size / 1e6:.1f} M parameters" in drawn for size in {p.parameters for p in laws.points}
    )
    said = [line for line in lines if line.startswith("width")]
    with pytest.raises(TrainingRefused, match=r"^out: .*--resume goes on"):
        measure_laws(job(settings), 0.01)
    again = measure_laws(job(replace(settings, resume=True)), 0.01)
    assert again.points == laws.points
    assert [line for line in lines if line.startswith("width")] == said
    assert json.loads((out / "laws.json").read_text())["said"]
