"""Proves that steps padded to buckets commit what steps of exact shapes commit.

Recording itself needs a GPU; on the CPU the same steps run through the same buffers.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from cluster.local_engine import LocalEngine
from replicas.eqspec import Group, Outcome
from replicas.graphs import Limits, StepRunner, bucket, verify_bucket
from replicas.replica import Replica
from replicas.sampling import SamplingBatch, sampling_batch
from replicas.stopwatch import Stopwatch
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, SamplingParams
from tests.oracle.test_trimmed import Trimming
from tests.oracle.worlds import mixed_requests, run_staggered, sampled
from tests.reference import plain_greedy
from tests.tiny_pairs import VOCAB, target_model, tiny_replica


@cache
def requests() -> list[Request]:
    return mixed_requests(VOCAB, 14, seed=31)


@cache
def greedy_reference() -> list[list[int]]:
    return [plain_greedy(target_model("qwen3"), r.prompt, r.max_new_tokens) for r in requests()]


@cache
def sampled_reference() -> list[list[int]]:
    engine = LocalEngine(tiny_replica("qwen3"), SchedulerConfig(rows_max=1, draft_len=0))
    return [output.tokens for output in engine.generate(sampled(requests()))]


def bucketed(**config: object) -> Replica:
    return tiny_replica("qwen3", graphs="on", **config)


def test_a_bucket_holds_n_and_at_most_half_more() -> None:
    seen = {bucket(n, None) for n in range(1025)}
    assert len(seen) == 21, "few shapes"
    for n in range(1, 1025):
        assert n <= bucket(n, None) <= max(n, 1.5 * (n - 1) + 1)
        assert n <= bucket(n, 700) <= max(n, 700)


@pytest.mark.parametrize("rows_max", [1, 3, 7])
@pytest.mark.parametrize("draft_len", [0, 1, 3, 5, 7])
def test_greedy_output_equals_plain_generate(rows_max: int, draft_len: int) -> None:
    outputs = run_staggered(bucketed(), requests(), rows_max, draft_len, seed=draft_len)
    assert [output.tokens for output in outputs] == greedy_reference()


@pytest.mark.parametrize("rows_max", [1, 5])
@pytest.mark.parametrize("draft_len", [0, 2, 5])
def test_sampled_output_is_that_of_exact_shapes(rows_max: int, draft_len: int) -> None:
    """Greedy rows among them, padding rows beside them."""
    outputs = run_staggered(bucketed(), sampled(requests()), rows_max, draft_len)
    assert [output.tokens for output in outputs] == sampled_reference()


@pytest.mark.parametrize("hot", [False, True])
def test_trimmed_steps_are_padded_as_well(hot: bool) -> None:
    trimming = Trimming(bucketed(), None)
    config = SchedulerConfig(rows_max=5, draft_len=5)
    outputs = LocalEngine(trimming, config).generate(sampled(requests()) if hot else requests())
    expected = sampled_reference() if hot else greedy_reference()
    assert [output.tokens for output in outputs] == expected


def test_a_verified_share_is_rounded_up_to_one_of_eight() -> None:
    for cells in range(1, 200):
        seen = {verify_bucket(asked, cells) for asked in range(cells + 1)}
        assert len(seen) <= 9, "few shapes"
        assert None in seen
        for asked in range(cells + 1):
            taken = verify_bucket(asked, cells)
            assert asked <= (cells if taken is None else taken) < asked + cells / 8 + 1
    # Those that schedulers choose, of full buckets.
    assert [verify_bucket(asked, 24) for asked in (0, 12, 18, 24)] == [0, 12, 18, None]


def test_trimmed_steps_are_of_few_kinds_and_say_what_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = bucketed()
    trimming = Trimming(replica, None)
    runner = replica._runner
    assert runner is not None
    step = runner.step
    asked: set[tuple[int, int, int | None]] = set()

    def noted(group: Group, watch: Stopwatch) -> Outcome:
        # The last steps of a batch have fewer draft tokens than it says.
        share = group.verify_tokens
        some = None if share is None else min(share, sum(group.draft_lens))
        asked.add((len(group.contents), max(group.draft_lens), some))
        return step(group, watch)

    monkeypatch.setattr(runner, "step", noted)
    engine = LocalEngine(trimming, SchedulerConfig(rows_max=5, draft_len=5))
    outputs = engine.generate(requests())
    assert [output.tokens for output in outputs] == greedy_reference()
    kinds = {(kind.rows, kind.k, kind.verify_tokens) for kind in runner.kinds}
    trimmed = {kind for kind in kinds if kind[2] is not None}
    assert trimmed
    assert len(kinds) <= len(asked)
    of_shape = Counter((rows, k) for rows, k, _ in kinds)
    assert max(of_shape.values()) <= 9, "eighths, and none left out"
    # How many there are is chance; none is of a number of its own.
    for rows, k, verified in trimmed:
        assert verified in {verify_bucket(one, rows * k) for one in range(rows * k + 1)}
    for _, result in trimming.batches:
        for row in result.rows:
            assert len(row.tokens) == row.steps + sum(row.accepted_at)
            for accepted, tried in zip(row.accepted_at, row.tried_at, strict=True):
                assert accepted <= tried <= row.steps
            # None is tried unless the one before it was accepted, and all of those are accepted
            # whose successor was tried.
            assert all(map(int.__ge__, row.accepted_at, row.tried_at[1:]))


def test_more_than_asked_is_checked_and_counted() -> None:
    """Up to each row's own draft length, whatever the bucket lets through."""
    replica = tiny_replica("qwen3", graphs="on")
    target, draft, shape = replica._target, replica._draft, replica._shape
    runner = StepRunner(target, draft, shape, Limits(8, 8, 256), 8)
    for asked, draft_lens in ((3, [5, 5, 4]), (9, [5, 5, 4]), (13, [5, 5, 4]), (1, [1, 5, 0])):
        group = Group(
            [[7] * 9, [8] * 12, [9] * 12],
            draft_lens,
            SamplingBatch.of([SamplingParams()] * 3, torch.device("cpu"), True, True),
            torch.arange(1, 28).view(3, 9),
            asked,
        )
        with torch.inference_mode():
            outcome = runner.step(group, Stopwatch(torch.device("cpu")))
        taken = runner.kinds[-1].verify_tokens
        most = sum(draft_lens)
        checked = sum(outcome.checked)
        assert checked == (most if taken is None else min(taken, most)) >= asked
        for index, draft_len in enumerate(draft_lens):
            assert outcome.accepted[index] <= outcome.checked[index] <= draft_len
            assert len(outcome.committed[index]) == outcome.accepted[index] + 1


def test_only_the_kinds_used_last_are_kept() -> None:
    replica = bucketed(graphs_max=3)
    outputs = run_staggered(replica, requests(), 7, 3)
    assert [output.tokens for output in outputs] == greedy_reference()
    runner = replica._runner
    assert runner is not None
    assert len(runner.kinds) == 3
    before = runner.kinds
    run_staggered(replica, requests()[:1], 1, 0)
    assert runner.kinds[-1].rows == 1
    assert set(runner.kinds) != set(before)


def test_a_step_of_one_kind_computes_on_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a recording replays: the same shapes at the same addresses, whatever the rows."""
    replica = bucketed(graphs_max=64)
    assert replica._runner is not None
    fed: dict[object, set[tuple[object, ...]]] = {}
    forward = replica._target.forward

    def noted(tokens, window, logits_to_keep=0):  # type: ignore[no-untyped-def]
        if noting:
            tensors = (tokens, window.positions, window.slots, window.blocks, window.mask)
            shapes = tuple(tuple(tensor.shape) for tensor in tensors)
            fed.setdefault(replica._runner.kinds, set()).add((shapes, window.length))
        return forward(tokens, window, logits_to_keep)

    monkeypatch.setattr(replica._target, "forward", noted)
    step = replica._runner.step
    noting = False
    made: dict[object, list[tuple[object, ...]]] = {}

    def stepped(group, watch):  # type: ignore[no-untyped-def]
        nonlocal noting
        noting = True
        fed.clear()
        outcome = step(group, watch)
        noting = False
        (passes,) = fed.values()
        kept = replica._runner._kept[replica._runner.kinds[-1]]
        address = (kept._inputs.state.data_ptr(), kept._inputs.table.data_ptr())
        made.setdefault(replica._runner.kinds[-1], []).append((frozenset(passes), address))
        return outcome

    monkeypatch.setattr(replica._runner, "step", stepped)
    # Which rows step together depends on how long steps take here, and so how often a kind comes.
    for seed in range(4):
        run_staggered(replica, requests(), 5, 3, seed)
    assert len(made) < 64, "none was dropped and made anew"
    assert max(map(len, made.values())) > 3, "some kind is used often"
    for uses in made.values():
        assert len(set(uses)) == 1


@pytest.mark.parametrize("hot", [False, True])
def test_a_padded_step_reads_the_device_once(hot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p included, whose search for the nucleus is otherwise led by values."""
    replica = bucketed()
    reads: list[str] = []
    counting = False
    for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):  # type: ignore[no-untyped-def]
            if counting:
                reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    runner = replica._runner
    assert runner is not None
    step, steps = runner.step, 0

    def stepped(group, watch):  # type: ignore[no-untyped-def]
        nonlocal counting, steps
        counting, steps = True, steps + 1
        outcome = step(group, watch)
        counting = False
        return outcome

    monkeypatch.setattr(runner, "step", stepped)
    run_staggered(replica, sampled(requests()) if hot else requests(), 4, 3)
    assert reads == ["tolist"] * steps
    assert steps > 5


def test_tables_and_parameters_are_written_once_an_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of the rows of one batch never serve another."""
    replica = bucketed()
    runner = replica._runner
    assert runner is not None
    written: list[object] = []
    overwrite = SamplingBatch.overwrite

    def noted(self: SamplingBatch, batch: SamplingBatch) -> None:
        written.append(batch)
        overwrite(self, batch)

    monkeypatch.setattr(SamplingBatch, "overwrite", noted)
    held = 0
    step = runner.step

    def stepped(group, watch):  # type: ignore[no-untyped-def]
        nonlocal held
        outcome = step(group, watch)
        held += 1
        fixed = runner._kept[runner.kinds[-1]]
        rows, columns = len(group.contents), group.table.shape[1]
        columns = min(columns, runner.kinds[-1].blocks)
        table = fixed._inputs.table
        assert torch.equal(table[:rows, :columns], group.table[:, :columns])
        assert not table[rows:].any()
        assert not table[:, columns:].any()
        if group.sampling.any_sampled:
            assert torch.equal(fixed._inputs.sampling.seed[:rows], group.sampling.seed)
            assert torch.equal(fixed._inputs.sampling.greedy[:rows], group.sampling.greedy)
            assert torch.equal(fixed._inputs.sampling.top_k[:rows], group.sampling.top_k)
        return outcome

    monkeypatch.setattr(runner, "step", stepped)
    outputs = run_staggered(replica, sampled(requests()), 5, 2)
    assert [output.tokens for output in outputs] == sampled_reference()
    assert len(written) < held, "batches of several steps, and rows that come again"
    assert held > 20


def test_equal_parameters_are_one_batch_and_others_are_not() -> None:
    cpu = torch.device("cpu")
    params = tuple(SamplingParams(temperature=0.7, seed=seed) for seed in (1, 2))
    batch = sampling_batch(params, cpu, True, True)
    assert sampling_batch(tuple(map(replace, params)), cpu, True, True) is batch
    turned = sampling_batch(params[::-1], cpu, True, True)
    assert turned.seed.tolist() == [[2], [1]]
    assert batch.seed.tolist() == [[1], [2]]
    assert sampling_batch(params, cpu, False, False).greedy is None


def test_limits_of_memory_are_limits_of_buckets() -> None:
    rng = random.Random(4)
    replica = tiny_replica("qwen3", graphs="on", plan_rows=5, plan_draft_len=3)
    shape, runner = replica._shape, replica._runner
    assert runner is not None
    for _ in range(20):
        rows, k, length = rng.randint(1, 5), rng.randint(0, 3), rng.randint(1, 252)
        group = Group(
            [[1] * length] * rows,
            [k] * rows,
            SamplingBatch.of([SamplingParams()] * rows, torch.device("cpu"), True, True),
            torch.zeros((rows, 64), dtype=torch.int64),
        )
        kind = runner._kind(group)
        assert rows <= kind.rows <= 5
        assert k <= kind.k <= 3
        assert length + k <= kind.blocks * shape.block_size
        assert kind.blocks <= -(-(256 + 3) // shape.block_size)
