"""Proves: what is reported of a way is of all its rounds, and the engine's benchmark needs neither
Ray nor gRPC.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace

from benchmarks.engine import lockstep_name, summary
from benchmarks.shared.measured import Contender, MeasuredWay, StepFigures
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from tests.tiny_pairs import tiny_replica


def test_a_run_remembers_what_its_results_say() -> None:
    way = MeasuredWay(tiny_replica("llama"), SchedulerConfig(rows_max=2, draft_len=3))
    requests = [Request(str(n), tuple(range(3, 9 + n)), 10) for n in range(5)]
    outputs = way(requests)
    assert [len(tokens) for tokens in outputs] == [10] * 5
    figures = way.figures
    assert 1 <= figures.committed_per_step <= 4
    assert 0 < figures.acceptance < 1
    for share in (figures.overhead, figures.between_batches):
        assert 0 <= share < 1
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


def figures_of(overhead: float, between: float) -> StepFigures:
    return StepFigures(2.0, None, overhead, between)


ROUNDS = [figures_of(*one) for one in ((0.05, 0.02), (0.50, 0.01), (0.06, 0.03))]


def test_the_summary_is_of_all_rounds_and_not_of_the_last() -> None:
    names = [lockstep_name(8, k) for k in (None, 0, 4)]
    contenders = tuple(Contender(name, 4, (10.0, 20.0, 30.0), 4) for name in names)
    ways = {name: MeasuredWay(tiny_replica("llama"), SchedulerConfig()) for name in names}
    ways[names[0]].runs = list(ROUNDS)
    args = Namespace(batches=[8], draft_lens=[None, 0, 4])
    figures = summary(contenders, contenders, ways, args)
    assert figures["neither draft nor target forward, batch 8"] == 0.06
    assert figures["between batches, batch 8"] == 0.02


def test_the_engines_benchmark_needs_no_ray() -> None:
    code = """
import sys
for name in ("ray", "grpc"):
    sys.modules[name] = None
import benchmarks.engine, cluster.bench.engine
"""
    subprocess.run([sys.executable, "-c", code], check=True)
