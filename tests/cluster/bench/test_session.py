"""Proves: what is compared is what the cluster serves, unless it was named; an engine's memory is
planned for the orders that it gets; a report says what was asked for apart from what came of it;
and what cannot be compared is refused before any load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.bench import session
from cluster.bench.arrivals import Closed, Extent
from cluster.bench.figures import PoolSums, Record
from cluster.bench.session import BenchError, Plan
from cluster.bench.workload import Lengths, Workload
from cluster.config import from_args
from protos import lockstep_pb2 as pb
from replicas.config import DEMO
from replicas.replica import Replica
from scheduler.config import DRAFT_LEN_MAX
from scheduler.messages import SamplingParams


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
    replica = session._as_served(from_args({}), served).replica
    assert (replica.target, replica.draft, replica.dtype) == ("org/large", "org/small", "bfloat16")
    replica = session._as_served(from_args({"target": "a/copy"}), served).replica
    assert (replica.target, replica.draft, replica.dtype) == ("a/copy", "org/small", "bfloat16")
    without = pb.ReplicaStatus(target="org/large", dtype="float32")
    assert session._as_served(from_args({}), without).replica.draft is None
    assert session._as_served(from_args({}), None).replica.target == DEMO


def test_a_smaller_vocabulary_than_that_of_the_drawn_prompts_is_refused() -> None:
    served = pb.ReplicaStatus(target=DEMO, draft=DEMO, dtype="float32", vocab_size=1_000_000)
    drawn = plan(prompt_tokens=Lengths.parse("4..8"))
    with pytest.raises(BenchError, match=r"prompt_tokens.*1000000"):
        session._check_comparable(drawn, from_args({}), served)
    session._check_comparable(plan(), from_args({}), served)


def test_an_engine_has_memory_and_leave_for_what_is_asked_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Loaded(Exception):
        pass

    def load(config: Any) -> Replica:
        raise Loaded(config.plan_rows, config.plan_draft_len)

    monkeypatch.setattr(Replica, "load", load)
    with pytest.raises(Loaded) as told:
        session.run_on_engine(
            plan(draft_len=12), from_args({"batch_size": 64}), lambda *progress: None
        )
    assert told.value.args == (64, 12)


def test_so_has_the_engine_that_verifies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cluster import cli_verify

    told: list[Any] = []

    def verify(prompts: Any, replica: Any, *rest: Any) -> Any:
        told.append(replica.plan_rows)
        raise ValueError("enough")

    monkeypatch.setattr(cli_verify, "verify", verify)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n')
    assert cli_verify.compare(from_args({"batch_size": 64}), path, None, {}, 4) == 2
    assert told == [64]


@pytest.mark.parametrize(("draft_len", "said"), [(None, "chosen"), (12, "12 asked for")])
def test_a_report_claims_no_more_drafting_than_the_figures_show(
    draft_len: int | None, said: str
) -> None:
    clamped = Record(0, 0.0, 0.0, 5, [(0.1, 18)], 0.1, "", 2, 16, 16, (2,) * 8)
    text = Workload(((3,),), "1 prompt", 18, SamplingParams(), True, draft_len, "salt")
    load = session._Load(text, [clamped], PoolSums(0, 0, 0, 0), PoolSums(1, 0, 9, 9), 0, {})
    made = session._report(plan(draft_len=draft_len), load, None, from_args({}))
    assert made.settings["draft tokens per step"] == said
    assert made.summary.drafted_per_step == 8


def test_a_draft_longer_than_any_is_refused() -> None:
    asked = plan(draft_len=DRAFT_LEN_MAX + 1)
    with pytest.raises(BenchError, match="draft_len"):
        session.run_on_engine(asked, from_args({}), lambda *progress: None)
