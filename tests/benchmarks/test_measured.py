"""Proves: the longest wait is what a hand count gives,
what is reported of a way is of all its rounds, and the engine's benchmark needs neither Ray nor
gRPC.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks.engine import lockstep_name, random_draft, sampled_runs, summary
from benchmarks.measured import MeasuredWay, StepFigures, longest_wait, over_rounds
from cluster.bench.compare import Contender
from replicas.config import ReplicaConfig
from replicas.demo import DRAFT_DIR
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, RowResult, StepResult
from tests.tiny_pairs import tiny_replica


def prefill(names: str) -> StepResult:
    return StepResult(0, "r", tuple(RowResult(name) for name in names))


def step(names: str) -> StepResult:
    return StepResult(0, "r", tuple(RowResult(name, (1,), 1) for name in names), steps=1)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        # All in one group: nobody is passed over, a step per round.
        ([prefill("ab"), step("ab"), step("ab")], 1.0),
        # Two groups in turn: c and d wait for one batch, a round for everyone.
        ([prefill("abcd"), *[step("ab"), step("cd")] * 3], 1.0),
        # b steps in the fourth batch, where a round is one batch.
        ([prefill("ab"), step("a"), step("a"), step("a"), step("b"), step("a")], 4.0),
        # The same is half as many rounds where four residents need two groups.
        ([prefill("abcd"), step("cd"), step("ad"), step("ac"), step("bd")], 2.0),
        # One that came in later did not wait before.
        ([prefill("a"), step("a"), step("a"), prefill("b"), step("ab")], 1.0),
    ],
)
def test_the_longest_wait_is_counted_in_rounds(results: list[StepResult], expected: float) -> None:
    assert longest_wait(results, rows_max=2, batches_in_flight=1) == expected


def test_batches_that_were_there_before_are_no_wait() -> None:
    results = [prefill("abcd"), *[step("ab"), step("cd")] * 3]
    assert longest_wait(results, rows_max=2, batches_in_flight=2) == 0.5


def test_a_run_remembers_what_its_results_say() -> None:
    way = MeasuredWay(tiny_replica("llama"), SchedulerConfig(rows_max=2, draft_len=3))
    requests = [Request(str(n), tuple(range(3, 9 + n)), 10) for n in range(5)]
    outputs = way(requests)
    assert [len(tokens) for tokens in outputs] == [10] * 5
    figures = way.figures
    assert 1 <= figures.committed_per_step <= 4
    assert figures.acceptance is not None
    assert 0 < figures.acceptance < 1
    for share in (figures.overhead, figures.padding, figures.between_batches):
        assert 0 <= share < 1
    assert 0 < figures.wait_rounds <= SchedulerConfig().wait_rounds
    alone = MeasuredWay(tiny_replica("llama"), SchedulerConfig(rows_max=1, draft_len=0))
    assert alone(requests) == outputs
    assert alone.figures.committed_per_step == 1.0
    assert alone.figures.acceptance is None


def test_every_run_to_its_end_is_remembered() -> None:
    way = MeasuredWay(tiny_replica("llama"), SchedulerConfig(rows_max=2, draft_len=3))
    requests = [Request(str(n), tuple(range(3, 9 + n)), 10) for n in range(5)]
    way(requests)
    first = way.figures
    way.begin(requests[:2])
    way.advance()
    assert way.runs == [first] == [way.figures], "one that goes on is none yet"
    while way.advance():
        pass
    assert len(way.runs) == 2
    assert way.runs[0] == first != way.figures == way.runs[1]


def figures_of(overhead: float, padding: float, between: float, wait: float) -> StepFigures:
    return StepFigures(2.0, wait, None, overhead, padding, between)


ROUNDS = [
    figures_of(0.05, 0.3, 0.02, 1.0),
    figures_of(0.50, 0.1, 0.01, 2.5),
    figures_of(0.06, 0.2, 0.03, 1.5),
]


def test_over_rounds_a_figure_is_the_median_and_a_wait_the_greatest() -> None:
    assert over_rounds(ROUNDS) == figures_of(0.06, 0.2, 0.02, 2.5)
    assert over_rounds(ROUNDS[:1]) == ROUNDS[0]


def test_the_summary_is_of_all_rounds_and_not_of_the_last() -> None:
    names = [lockstep_name(8, k) for k in (None, 0, 4)]
    contenders = tuple(Contender(name, 4, (10.0, 20.0, 30.0), 4) for name in names)
    ways = {name: MeasuredWay(tiny_replica("llama"), SchedulerConfig()) for name in names}
    ways[names[0]].runs = list(ROUNDS)
    args = Namespace(batches=[8], draft_lens=[None, 0, 4])
    figures = summary(contenders, contenders, ways, args)
    assert figures["neither draft nor target forward, batch 8"] == 0.06
    assert figures["between batches, batch 8"] == 0.02
    assert figures["padding, batch 8"] == 0.2
    assert figures["longest wait in rounds, batch 8"] == 2.5


def test_sampled_runs_are_compared_with_those_at_batch_1_without_drafting() -> None:
    requests = [Request(str(n), tuple(range(3, 9 + n)), 6) for n in range(3)]
    sampled, identical = sampled_runs(tiny_replica("llama"), requests)
    assert set(identical.values()) == {"3 of 3"}
    assert all(0 < run["overhead"] < 1 for run in sampled.values())


def test_the_engines_benchmark_needs_no_ray() -> None:
    code = """
import sys
for name in ("ray", "grpc"):
    sys.modules[name] = None
import benchmarks.engine, cluster.bench.compare, cluster.bench.engine
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_hopeless_draft_is_hardly_ever_right_and_changes_no_output(tmp_path: Path) -> None:
    random_draft("tiny", tmp_path)
    shape = AutoConfig.from_pretrained(tmp_path)
    assert shape.num_hidden_layers == AutoConfig.from_pretrained(DRAFT_DIR).num_hidden_layers
    config = ReplicaConfig(device="cpu", kv_blocks=200, draft=str(tmp_path))
    replica = Replica.load(config)
    requests = [Request(str(i), tuple(range(10 * i + 1, 10 * i + 20)), 24) for i in range(4)]
    plain, drafting = (
        MeasuredWay(replica, SchedulerConfig(rows_max=4, draft_len=k)) for k in (0, 4)
    )
    assert drafting(requests) == plain(requests)
    assert drafting.figures.acceptance is not None
    assert drafting.figures.acceptance < 0.02
