"""Proves: what is compared is what the cluster serves, unless it was named; an engine's memory is
planned for the batches that it gets; a report says what was asked for apart from what came of it;
what cannot be compared is refused before any load, or left out; and nothing that happens after a
load costs its report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.bench import compare, session
from cluster.bench.arrivals import Closed, Extent
from cluster.bench.compare import Comparison
from cluster.bench.figures import PoolSums, Record
from cluster.bench.session import Plan
from cluster.bench.transformers_runs import Transformers
from cluster.bench.workload import BenchError, Workload
from cluster.cli.main import main
from cluster.config_sources import from_args
from protos import lockstep_pb2 as pb
from replicas.models.names import TINY
from replicas.replica import Replica
from scheduler.config import DRAFT_LEN_MAX, SchedulerConfig
from scheduler.messages import ReplicaSpec, Request, SamplingParams


def plan(**settings: Any) -> Plan:
    given: dict[str, Any] = {
        "arrivals": Closed(2),
        "extent": Extent(requests=2),
        "warm_up": 0,
        "prompts": None,
        "prompt_tokens": None,
        "limit": 2,
        "seed": 0,
        "max_new_tokens": 4,
        "sampling": SamplingParams(),
        "ignore_eos": True,
        "draft_len": None,
        "compare": False,
        "rounds": 1,
        "compare_prompts": 2,
    }
    return Plan(**(given | settings))


def test_the_models_that_are_served_are_compared_but_for_what_is_named() -> None:
    served = pb.ReplicaStatus(target="org/large", draft="org/small", dtype="bfloat16")
    served.drafter = "draft_model"
    replica = compare.as_served(from_args({}), served).replica
    assert (replica.target, replica.draft, replica.dtype) == ("org/large", "org/small", "bfloat16")
    replica = compare.as_served(from_args({"target": "a/copy"}), served).replica
    assert (replica.target, replica.draft, replica.dtype) == ("a/copy", "org/small", "bfloat16")
    without = pb.ReplicaStatus(target="org/large", dtype="float32")
    assert compare.as_served(from_args({}), without).replica.drafting.method == "none"
    suffix = pb.ReplicaStatus(target="org/large", drafter="suffix", dtype="float32")
    assert compare.as_served(from_args({}), suffix).replica.drafting.method == "suffix"
    suffix.drafter, suffix.draft = "eagle3, only 1.0% right", "org/head"
    drafting = compare.as_served(from_args({}), suffix).replica.drafting
    assert (drafting.method, drafting.model) == ("eagle3", "org/head")
    named = from_args({"speculative": {"method": "none"}})
    assert compare.as_served(named, suffix).replica.drafting.method == "none"
    assert compare.as_served(from_args({}), None).replica.target == TINY


def test_a_smaller_vocabulary_than_that_of_the_drawn_prompts_is_refused() -> None:
    served = pb.ReplicaStatus(target=TINY, draft=TINY, dtype="float32", vocab_size=1_000_000)
    with pytest.raises(BenchError, match=r"prompt_tokens.*1000000"):
        compare.check_comparable(from_args({}), served, drawn=True)
    compare.check_comparable(from_args({}), served, drawn=False)


def test_prompts_that_do_not_fit_are_left_out_and_that_is_said() -> None:
    spec = ReplicaSpec(kv_blocks=8, block_size=16, context_len=64, vocab_size=100)
    short, long = (Request(str(n), (3,) * n, 16) for n in (40, 60))
    assert compare.that_fit([short], SchedulerConfig(), spec) == ([short], "")
    fit, said = compare.that_fit([long, short, long], SchedulerConfig(), spec)
    assert fit == [short]
    assert said.startswith("2 of 3 prompts are not compared: max_new_tokens: prompt (60)")
    with pytest.raises(BenchError, match=r"no prompt can be compare.*60"):
        compare.that_fit([long], SchedulerConfig(), spec)


def load(after: PoolSums | None, unanswered: str = "") -> session.Load:
    clamped = Record(0, 0.0, 0.0, 5, [(0.1, 18)], 0.1, "", 2, 16, 16, (2,) * 8)
    text = Workload(((3,),), "1 prompt", 18, SamplingParams(), True, None, "salt")
    before = PoolSums(0, 0, 0, 0, "pool", frozenset({"a"}))
    return session.Load(text, [clamped], before, after, 0, {}, unanswered)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (PoolSums(1, 0, 9, 9, "pool", frozenset({"a", "b"})), []),
        (PoolSums(1, 0, 9, 9, "pool", frozenset({"b"})), ["a replica left during the run"]),
        (None, ["gave no status at the end (UNAVAILABLE)"]),
    ],
)
def test_a_report_says_why_figures_are_missing(after: PoolSums | None, said: list[str]) -> None:
    made = session.report_of(plan(), load(after, "UNAVAILABLE"))
    assert [words in note for words, note in zip(said, made.notes, strict=True)] == [True] * len(
        said
    )


COMPARISON = Comparison(1, 18, 1, "", (), ())


def test_the_report_of_the_load_comes_before_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = []

    def run(*_given: object) -> Comparison:
        begun.append(1)
        return COMPARISON

    monkeypatch.setattr(compare, "compare_config", run)
    given: Any = (from_args({}), load(None), object(), None, lambda *progress: None)
    reports = session.reports_of(plan(compare=True), *given)
    first = next(reports)
    assert (begun, first.comparison, first.not_compared) == ([], None, session.NOT_FINISHED)
    (second,) = reports
    assert (second.comparison, second.not_compared) == (COMPARISON, "")
    assert second.summary is first.summary
    (alone,) = session.reports_of(plan(), *given)
    assert (alone.comparison, alone.not_compared) == (None, "")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("[enforce fail] no memory"), MemoryError("none"), AssertionError("a defect")],
)
@pytest.mark.parametrize("loading", [True, False])
def test_a_comparison_that_fails_leaves_the_load_and_says_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception, loading: bool
) -> None:
    def fail(*_given: object) -> Any:
        raise error

    monkeypatch.setattr(*((Transformers, "load") if loading else (compare, "compare_config")), fail)
    models: Any = None if loading else object()
    first, second = session.reports_of(
        plan(compare=True), from_args({}), load(None), models, None, lambda *progress: None
    )
    assert second.not_compared == f"{type(error).__name__}: {error}"
    assert (second.comparison, second.summary) == (None, first.summary)


def test_an_engine_has_memory_and_leave_for_what_is_asked_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Loaded(Exception):
        pass

    def load(config: Any) -> Replica:
        raise Loaded(config.plan_rows, config.plan_draft_len)

    monkeypatch.setattr(Replica, "load", load)
    with pytest.raises(Loaded) as told:
        next(
            session.run_on_engine(
                plan(draft_len=12), from_args({"batch_size": 64}), lambda *progress: None
            )
        )
    assert told.value.args == (64, 12)


def test_so_has_the_engine_that_verifies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[Any] = []

    def verify(prompts: Any, replica: Any, *rest: Any) -> Any:
        told.append(replica.plan_rows)
        raise ValueError("enough")

    monkeypatch.setattr("cluster.verify.verify", verify)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n')
    arguments = ["verify", "--prompts", str(path), "--batch-size", "64"]
    assert CliRunner().invoke(main, arguments).exit_code == 2
    assert told == [64]


@pytest.mark.parametrize(("draft_len", "said"), [(None, "chosen"), (12, "12 asked for")])
def test_a_report_claims_no_more_drafting_than_the_figures_show(
    draft_len: int | None, said: str
) -> None:
    made = session.report_of(plan(draft_len=draft_len), load(None))
    assert made.settings["draft tokens per step"] == said
    assert made.summary.drafted_per_step == 8


def test_a_draft_longer_than_any_is_refused() -> None:
    asked = plan(draft_len=DRAFT_LEN_MAX + 1)
    with pytest.raises(BenchError, match="draft_len"):
        next(session.run_on_engine(asked, from_args({}), lambda *progress: None))
