"""Proves that a replica that was tried is as before, and that the pool learns from the trials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from replicas import calibration
from replicas.calibration import (
    DRAFT_LENS,
    LENGTH,
    PHRASE,
    PREFILLS,
    ROWS,
    Trial,
    calibrate,
    calibrated,
)
from replicas.config import ReplicaConfig
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.draft_length import DraftPolicy
from scheduler.messages import Batch, BatchKind, Request, StepResult, TriedBatch
from scheduler.state import Sequence
from tests.replicas.heads import TARGET_VOCAB, headed_replica, said, save_head
from tests.replicas.pool import failing_pass
from tests.tiny_pairs import target_model, tiny_replica


def tried(kind: BatchKind, replica: Trial, *most: int) -> list[TriedBatch]:
    return [timed for timed in calibrate(replica, *most) if timed[0].kind is kind]


def steps_of(replica: Trial, *most: int) -> list[TriedBatch]:
    return tried(BatchKind.SPECULATE, replica, *most)


def prefills_of(replica: Trial) -> list[TriedBatch]:
    return tried(BatchKind.PREFILL, replica)


def kinds(steps: list[TriedBatch]) -> set[tuple[int, int]]:
    """(rows, draft tokens) of each."""
    return {(len(batch.rows), batch.draft_len) for batch, _ in steps}


def test_few_and_many_rows_are_timed_with_and_without_drafting() -> None:
    replica = tiny_replica("llama")
    free = replica.free_blocks
    steps = steps_of(replica)
    assert kinds(steps) == {(rows, draft_len) for rows in ROWS for draft_len in DRAFT_LENS}
    assert all(result.times.verify_s > 0 for _, result in steps)
    assert all((result.times.draft_s > 0) == (batch.draft_len > 0) for batch, result in steps)
    assert all(row.length >= LENGTH for batch, _ in steps for row in batch.rows)
    policy = DraftPolicy(SchedulerConfig())
    policy.joined("r", replace(replica.spec, trials=tuple(steps)))
    plan = policy.plan("r", [Sequence(Request("q", (1,) * LENGTH, 100), 1)], 1)
    assert policy.estimates("r").step_s > 0
    assert plan.draft_lens
    assert replica.residents == ()
    assert replica.free_blocks == free
    replica.check_integrity()


def test_rows_of_a_trial_have_texts_of_their_own_that_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same tokens in all rows would hit the same experts, and a step seem faster than it is."""
    replica = tiny_replica("llama")
    step, texts = replica.step, []

    def watched(batch: Batch) -> StepResult:
        texts.append([row.tokens for row in batch.prefill])
        return step(batch)

    monkeypatch.setattr(replica, "step", watched)
    calibrate(replica)
    (together,) = (rows for rows in texts if len(rows) == max(ROWS))
    assert len(set(together)) == len(together)
    for text in together:
        assert len(set(text)) > PHRASE // 2
        assert text[PHRASE:] == text[:-PHRASE], "suffix decoding has drafts"


def test_a_replica_without_room_is_tried_as_far_as_it_goes() -> None:
    replica = tiny_replica("llama", num_gpu_blocks_override=64, plan_rows=5, plan_draft_len=3)
    assert replica.planned == (5, 3)
    assert kinds(steps_of(replica)) == {(1, 0), (1, 4), (2, 0), (2, 4)}
    assert kinds(steps_of(replica, 2, 0)) == {(1, 0), (2, 0)}, "memory is planned for no more"
    replica.spec = replace(replica.spec, rows_max=1)
    assert kinds(steps_of(replica)) == {(1, 0), (1, 4)}
    replica.spec = replace(replica.spec, draft_len_max=2)
    assert kinds(steps_of(replica)) == {(1, 0), (1, 2)}
    replica.spec = replace(replica.spec, context_len=32)
    assert (steps_of(replica), len(prefills_of(replica))) == ([], PREFILLS)
    replica.spec = replace(replica.spec, context_len=16)
    assert calibrate(replica) == ()


@pytest.mark.parametrize("sharing", [True, False])
def test_prefills_of_few_and_many_tokens_are_timed_and_find_nothing_filled(
    monkeypatch: pytest.MonkeyPatch, sharing: bool
) -> None:
    sizes = (32, 128)  # a tiny model's context has room for
    monkeypatch.setattr(calibration, "CHUNKS", sizes)
    replica = tiny_replica("llama", prefix_sharing=sharing)
    free = replica.free_blocks
    step, reused = replica.step, []

    def watched(batch: Batch) -> StepResult:
        result = step(batch)
        if len(batch.prefill) == 1 and len(batch.prefill[0].tokens) - 1 in sizes:
            reused.append(result.rows[0].reused)
        return result

    monkeypatch.setattr(replica, "step", watched)
    prefills = prefills_of(replica)
    assert [batch.prefill_tokens for batch, _ in prefills] == sorted(sizes * PREFILLS)
    assert all(result.times.prefill_s > 0 for _, result in prefills)
    assert reused == [0] * len(sizes) * (PREFILLS + 1), "each fills all of its positions"
    assert replica.residents == ()
    assert replica.free_blocks == free
    replica.check_integrity()


def test_a_prefill_that_takes_long_is_the_largest_one_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "CHUNKS", (16, 32, 128))
    replica = tiny_replica("llama")
    for most_s, sizes in ((0.0, [16, 32]), (1e9, [16, 32, 128])):
        monkeypatch.setattr(calibration, "CHUNK_S_MAX", most_s)
        tried = [batch.prefill_tokens for batch, _ in prefills_of(replica)]
        assert tried[::PREFILLS] == sizes


@pytest.mark.parametrize("number", [2, 12])
def test_trials_that_fail_leave_nothing_behind(number: int) -> None:
    """A pass of a prefill, and one of a step."""
    replica = tiny_replica("llama")
    with pytest.raises(RuntimeError), failing_pass(replica, number):
        calibrate(replica)
    assert replica.residents == ()
    replica.check_integrity()


@pytest.mark.parametrize("right", [True, False])
def test_a_right_head_is_not_warned_about_and_another_targets_is(
    right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Tiny random models say the same over and over, and so does any head.
    monkeypatch.setattr(calibration, "RIGHT_LEAST", 0.3)
    if right:
        speculative = {"method": "eagle3", "model": "planted:head"}
        target = "planted:tiny?acceptance=0.7"
        config = ReplicaConfig(
            target=target, speculative_config=speculative, device="cpu", num_gpu_blocks_override=512
        )
        replica = Replica.load(config.model_copy(update={"calibrate": False}))
    else:
        whole = said(True, draft_vocab_size=TARGET_VOCAB)
        replica = headed_replica(save_head(tmp_path, target_model("llama").config, whole))
    spec = calibrated(replica, *replica.planned, replica.aux_layers)
    assert spec.acceptance is not None
    assert (spec.acceptance > 0.5) == right, spec.acceptance
    assert ("the wrong weights or layers?" in spec.drafter) == (not right)
    assert bool(caplog.records) == (not right)
