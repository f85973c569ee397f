"""Proves that a replica on two ranks (processes that talk gloo) is a replica on one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cluster.local_engine import LocalEngine
from replicas.config import ReplicaConfig
from replicas.memory import MemoryPlan, PairShape, TooLittleMemory, pair_shape_of, plan_memory
from replicas.models.pair import PairRefused, read_pair
from replicas.models.shapes import SHAPES
from replicas.parallel import ranks
from replicas.parallel import replica as parallel
from replicas.parallel.meeting import Address, Meeting
from replicas.parallel.ranks import Ranks, ReplicaBroken
from replicas.parallel.replica import ParallelReplica, _LocalRank, load_parallel
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, SamplingParams
from tests.open_files import assert_closed_but, open_files
from tests.replicas.test_replica import Client
from tests.tiny_pairs import tiny_replica

NEW = 16


def config(shape: str, **more: object) -> ReplicaConfig:
    return ReplicaConfig(
        target=f"planted:{shape}?scale=0.8&layers=2",
        draft="planted:tiny-draft",
        device="cpu",
        torch_threads=1,
        block_size=4,
        kv_blocks=512,
        calibrate=False,
        **more,
    )


def run(replica: Replica | ParallelReplica, batch: int, k: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(
            str(i),
            tuple(torch.randint(512, (3 + 7 * i,), generator=generator).tolist()),
            NEW,
            sampling=SamplingParams(temperature=0.8 * (i % 2), seed=i),
        )
        for i in range(5)
    ]
    engine = LocalEngine(replica, SchedulerConfig(rows_max=batch, draft_len=k))
    return [output.tokens for output in engine.generate(requests)]


@pytest.fixture
def loaded() -> Iterator[list[ParallelReplica]]:
    replicas: list[ParallelReplica] = []
    yield replicas
    for replica in replicas:
        replica.close()


@pytest.mark.parametrize(
    ("model_type", "vocab", "bias"),
    [("llama", 512, False), ("qwen3", 511, False), ("glm4", 512, True)],
)
def test_two_ranks_give_the_tokens_of_one(
    tmp_path: Path, model_type: str, vocab: int, bias: bool, loaded: list[ParallelReplica]
) -> None:
    """An odd vocabulary cannot be divided: its output matrix stays whole."""
    sizes = {
        **SHAPES["tiny"],
        "model_type": model_type,
        "vocab_size": vocab,
        "attention_bias": bias,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    settings = config(str(tmp_path)).model_copy(update={"draft": None} if vocab != 512 else {})
    if model_type == "llama":
        settings = settings.model_copy(update={"calibrate": True})
    single = Replica.load(settings)
    double = load_parallel(settings.model_copy(update={"tensor_parallel": 2}))
    loaded.append(double)
    # Layers that are parted are the model's own, and sums of parts have other bits.
    assert "separate layers" in double.spec.arithmetic
    told = {name: getattr(double.spec, name) for name in ("arithmetic", "fingerprint", "timings")}
    assert double.spec.fingerprint != single.spec.fingerprint
    assert double.spec == replace(single.spec, reads_apart=double.spec.reads_apart, **told)
    assert len(double.spec.timings) == len(single.spec.timings)
    assert bool(double.spec.timings) == settings.calibrate
    for batch, k in ((1, 0), (4, 3), (3, 2)):
        assert run(double, batch, k) == run(single, batch, k)
    assert double.residents == ()


def test_a_rank_that_ends_breaks_the_replica_at_once(loaded: list[ParallelReplica]) -> None:
    double = load_parallel(config("tiny", tensor_parallel=2))
    loaded.append(double)
    expected = run(double, 2, 2)
    assert len(expected) == 5
    process = double._ranks._processes[0]
    assert isinstance(process, _LocalRank)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.leave(10)
    assert process.ended() == "exit code -9"
    with pytest.raises(ReplicaBroken, match=r"rank 1 (has ended|is gone)"):
        run(double, 2, 2)


ROWS, FATAL = 2, 3
"""Rows, and the draft length, at which a rank breaks."""


def _breaking(how: str, config: ReplicaConfig, rank: int, address: Address) -> None:
    """A rank as any other, but for its verification of FATAL draft tokens."""
    load = parallel._load

    def loaded(*args: object) -> Replica:
        if how == "refuses":
            raise PairRefused("nothing here")
        if how == "lacks":
            raise KeyError("q_proj")
        replica = load(*args)  # type: ignore[arg-type]
        forward = replica._target.forward

        def fails(tokens, layout, *wants):  # type: ignore[no-untyped-def]
            if tokens.shape[0] == ROWS * (FATAL + 1):
                if how == "ends":
                    os._exit(1)
                raise MemoryError("no room here")
            return forward(tokens, layout, *wants)

        replica._target.forward = fails  # type: ignore[method-assign]
        return replica

    parallel._load = loaded
    follow(config, rank, address)


follow = parallel.follow


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1 failed with MemoryError: no room here, and rank 0 did not"),
        ("ends", "rank 1 has ended"),
    ],
)
def test_a_rank_that_breaks_within_a_step_is_not_waited_for(
    how: str, message: str, loaded: list[ParallelReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is inside a sum then; the process group would end that after minutes, unnamed."""
    monkeypatch.setattr(parallel, "follow", partial(_breaking, how))
    monkeypatch.setattr(ranks, "ALONE_S", 0.5)
    double = load_parallel(config("tiny", tensor_parallel=2))
    loaded.append(double)
    assert len(run(double, ROWS, FATAL - 1)) == 5
    for _ in range(2):
        with pytest.raises(ReplicaBroken, match=message):
            run(double, ROWS, FATAL)


def test_ranks_that_wait_for_rank_0_are_not_waited_for(
    loaded: list[ParallelReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    double = load_parallel(config("tiny", tensor_parallel=2))
    loaded.append(double)
    assert len(run(double, 2, 2)) == 5
    monkeypatch.setattr(parallel, "FAILED_S", 0.5)
    monkeypatch.setattr(double._replica._target, "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ReplicaBroken, match=r"rank 1 has not answered 0\.5 s after rank 0"):
        run(double, 2, 2)


def test_an_error_of_all_ranks_breaks_nothing(loaded: list[ParallelReplica]) -> None:
    double = load_parallel(config("tiny", tensor_parallel=2))
    loaded.append(double)
    client = Client(double)  # type: ignore[arg-type]
    client.prefill(a=[4, 5, 6])
    client.contents["a"].append(7)
    with pytest.raises(AssertionError, match="the pool says 4 tokens"):
        client.steps(2)
    assert double.residents == ("a",)
    assert len(run(double, 2, 2)) == 5


@pytest.mark.parametrize(
    ("how", "message"), [("refuses", "PairRefused: nothing here"), ("lacks", "KeyError: 'q_proj'")]
)
def test_what_a_rank_fails_with_while_it_loads_is_told(
    how: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits to meet it."""
    monkeypatch.setattr(parallel, "follow", partial(_breaking, how))
    with pytest.raises(PairRefused, match=f"rank 1 failed with {message}"):
        load_parallel(config("tiny", tensor_parallel=2))


class _Ended:
    """A rank's process, as its starter sees it."""

    def __init__(self, how: str | None) -> None:
        self._how = how

    def ended(self) -> str | None:
        return self._how

    def kill(self) -> None: ...

    def leave(self, within_s: float) -> None: ...


def test_a_rank_that_came_says_itself_why_it_ends() -> None:
    processes = [_Ended("exit code 1"), _Ended(None)]
    assert parallel._lost(processes, [2]) is None
    assert parallel._lost(processes, [1, 2]) == "rank 1 has ended before it came: exit code 1"


@pytest.mark.parametrize(
    ("gpus", "same"),
    [
        ("abc", None),
        ("aab", "0 and 1"),
        ("aba", "0 and 2"),
        ("abb", "1 and 2"),
        (("", "", ""), None),
    ],
)
def test_ranks_that_have_the_same_gpu_are_refused(gpus: Sequence[str], same: str | None) -> None:
    pipes = [Pipe() for _ in gpus[1:]]
    for (_, theirs), gpu in zip(pipes, gpus[1:], strict=True):
        theirs.send(gpu)
    known = Ranks([ours for ours, _ in pipes], [])
    try:
        if same is None:
            parallel._all_here(gpus[0], known)
        else:
            with pytest.raises(ReplicaBroken, match=f"ranks {same} have the same GPU"):
                parallel._all_here(gpus[0], known)
    finally:
        known.close()
        for _, theirs in pipes:
            theirs.close()


@pytest.mark.parametrize("broken", [False, True])
def test_ranks_that_are_closed_leave_no_pipe_open(broken: bool) -> None:
    before = open_files()
    ours, theirs = Pipe()
    closed = Ranks([ours], [])
    if broken:
        with pytest.raises(ReplicaBroken, match="differs"):
            closed.fail("rank 1 differs")
    for _ in range(2):
        closed.close()
    theirs.close()
    assert_closed_but(before)


def test_a_rank_that_cannot_be_started_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_more(_process: SpawnProcess) -> None:
        raise BlockingIOError("no process left")

    monkeypatch.setattr(SpawnProcess, "start", no_more)
    Meeting().close()  # what torch opens once and for all
    before = open_files()
    with pytest.raises(BlockingIOError, match="no process left") as raised:
        load_parallel(config("tiny", tensor_parallel=2))
    # Whoever keeps the error keeps all that its frames held.
    assert raised.tb is not None
    assert_closed_but(before)


def test_a_rank_that_disagrees_breaks_the_replica_for_good() -> None:
    ours, theirs = Pipe()
    theirs.send([("a", (1, 2, 3))])
    replica = ParallelReplica(tiny_replica("llama"), Ranks([ours], []))
    client = Client(replica)  # type: ignore[arg-type]
    with pytest.raises(
        ReplicaBroken, match=r"rank 1 answered .*1, 2, 3.* rank 0 \[\('a', \(\)\)\]"
    ):
        client.prefill(a=[4, 5, 6])
    with pytest.raises(ReplicaBroken, match="rank 1 answered"):
        client.prefill(b=[4, 5, 6])


def test_deterministic_holds_on_two_ranks_which_end_with_their_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A process takes more than a second to end, and longer on a busy machine.
    monkeypatch.setattr(ranks, "_LEAVE_S", 100.0)
    double = load_parallel(config("tiny", tensor_parallel=2, dtype="bfloat16", deterministic=True))
    assert run(double, 1, 0) == run(double, 5, 4) == run(double, 3, 1)
    process = double._ranks._processes[0]
    double.close()
    assert process.ended() == "exit code 0"


def test_a_rank_has_the_part_that_was_planned_before_weights_were_read(
    loaded: list[ParallelReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[PairShape] = []

    def plan(config: ReplicaConfig, pair: PairShape, *rest: Any, **more: Any) -> MemoryPlan:
        planned.append(pair)
        return plan_memory(config, pair, *rest, **more)

    monkeypatch.setattr("replicas.memory.plan.plan_memory", plan)
    monkeypatch.setattr(parallel, "plan_memory", plan)
    loaded.append(load_parallel(config("tiny", tensor_parallel=2)))
    before, after = planned
    assert before == after
    whole = config("tiny")
    assert before.target_bytes < pair_shape_of(read_pair(whole), whole).target_bytes


def test_too_little_memory_for_a_rank_is_refused_before_any_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel, "start_here", lambda *_args: pytest.fail("a rank was started"))
    with pytest.raises(TooLittleMemory, match="do not hold"):
        load_parallel(config("tiny", tensor_parallel=2, memory=1000))


def test_what_cannot_be_divided_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(PairRefused, match=r"tensor_parallel: num_attention_heads is 4.*3 ranks"):
        load_parallel(config("tiny", tensor_parallel=3))
    with pytest.raises(PairRefused, match="num_key_value_heads is 2, which 4 ranks"):
        load_parallel(config("tiny", tensor_parallel=4))
    with pytest.raises(ValidationError, match="tensor_parallel: device cuda:1 is one of several"):
        ReplicaConfig(device="cuda:1", tensor_parallel=2)
