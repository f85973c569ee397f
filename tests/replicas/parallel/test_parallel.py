"""Proves that a replica on two ranks (processes that talk gloo) is a replica on one, and that
messages arrive as what they are. A rank that ends, fails alone, disagrees or never comes breaks the
replica within a bound, with an error that names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from replicas.config import ReplicaConfig
from replicas.errors import PairRefused, TooLittleMemory
from replicas.memory import MemoryPlan, PairShape, plan_memory
from replicas.names import SHAPES
from replicas.pair import read_pair
from replicas.parallel import parallel_replica as parallel, ranks
from replicas.parallel.parallel_replica import ParallelReplica, load_parallel, start_here
from replicas.parallel.ranks import Failure, LocalRank, Ranks, ReplicaBroken
from replicas.parallel.rendezvous import Address, Channel, Store, host_store, join_store
from replicas.replica import Replica
from scheduler.messages import Batch, BatchKind, PrefillRow, Sampling, StepRow
from tests.replicas.parallel.conftest import Load
from tests.replicas.parallel.planted import config, run
from tests.replicas.pool import Client
from tests.tiny_pairs import tiny_replica

TWO = config("tiny", tensor_parallel=2)


# --------------------------------------------------------------------------- one replica


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "vocab", "bias", "speculative"),
    [
        ("llama", 512, False, {"method": "draft_model", "model": "planted:tiny-draft"}),
        ("qwen3", 511, False, {"method": "suffix"}),
        ("glm4", 512, True, {"method": "eagle3", "model": "planted:head"}),
    ],
)
def test_two_ranks_give_the_tokens_of_one(
    tmp_path: Path, model_type: str, vocab: int, bias: bool, speculative: dict[str, str], load: Load
) -> None:
    """With every kind of drafter, all on rank 0. An odd vocabulary cannot be divided: its output
    matrix stays whole."""
    sizes = {
        **SHAPES["tiny"],
        "model_type": model_type,
        "vocab_size": vocab,
        "attention_bias": bias,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    settings = config(
        "tiny",
        target=f"planted:{tmp_path}?scale=0.8&layers=4",
        speculative_config=speculative,
        calibrate=model_type == "llama",
    )
    single = Replica.load(settings)
    double = load(settings.model_copy(update={"tensor_parallel": 2}))
    # Layers that are divided are the model's own, and sums of parts have other bits.
    assert "separate layers" in double.spec.arithmetic
    told = {name: getattr(double.spec, name) for name in ("arithmetic", "fingerprint", "trials")}
    assert double.spec.fingerprint != single.spec.fingerprint
    assert double.spec == replace(single.spec, **told)
    assert len(double.spec.trials) == len(single.spec.trials)
    assert bool(double.spec.trials) == settings.calibrate
    for batch, k in ((1, 0), (4, 3), (3, 2)):
        assert run(double, batch, k) == run(single, batch, k)
    assert double.residents == ()


def test_deterministic_holds_on_two_ranks_which_end_with_their_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks are new processes here, as they are where a replica serves."""
    # A process takes more than a second to end, and longer on a busy machine.
    monkeypatch.setattr(ranks, "LEAVE_S", 100.0)
    started: list[LocalRank] = []

    def start(*given: Any) -> LocalRank:
        started.append(start_here(*given))
        return started[-1]

    two = config("tiny", tensor_parallel=2, dtype="bfloat16", deterministic=True)
    double = load_parallel(two, start)
    assert run(double, 1, 0) == run(double, 5, 4) == run(double, 3, 1)
    double.close()
    assert [rank.ended() for rank in started] == ["exit code 0"]


def test_an_error_of_all_ranks_breaks_nothing_and_one_of_rank_0_does(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that wait for rank 0 are not waited for. And a rank has the part that was planned
    before weights were read."""
    planned: list[PairShape] = []

    def plan(config: ReplicaConfig, pair: PairShape, *rest: Any, **more: Any) -> MemoryPlan:
        planned.append(pair)
        return plan_memory(config, pair, *rest, **more)

    monkeypatch.setattr("replicas.memory.plan.plan_memory", plan)
    monkeypatch.setattr(parallel, "plan_memory", plan)
    double = load(TWO)
    before, after = planned
    assert before == after
    whole = config("tiny")
    assert before.target_bytes < read_pair(whole).shape.target_bytes

    client = Client(double)  # type: ignore[arg-type]
    client.prefill(a=[4, 5, 6])
    client.contents["a"].append(7)
    with pytest.raises(AssertionError, match="the pool says 4 tokens"):
        client.steps(2)
    assert double.residents == ("a",)
    # What rank 0 said of a row that has gone, how far its drafter was, holds for none that comes.
    client.contents["a"].pop()
    client.steps(0, n=12)
    double.release(["a"])
    for name in ("a", "b"):
        client.prefill(**{name: [*client.contents["a"], 8]})
    client.steps(1)
    double.release(["a", "b"])
    assert len(run(double, 2, 2)) == 5

    monkeypatch.setattr(parallel, "FAILED_S", 0.5)
    monkeypatch.setattr(double.replica.target, "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ReplicaBroken, match=r"rank 1 has not answered within 0\.5 s"):
        run(double, 2, 2)


# --------------------------------------------------------------------------- what breaks it


class _Silent:
    """A rank's process that says nothing; it runs unless it is said how it ended."""

    killed = left = False
    end: str | None = None

    def ended(self) -> str | None:
        return self.end

    def kill(self) -> None:
        self.killed = True

    def leave(self, within_s: float) -> None:
        self.left = True


@pytest.fixture
def silent() -> Iterator[tuple[Ranks, Store, list[_Silent]]]:
    """Ranks 1 and 2, the store, and their processes."""
    store, address = host_store()
    handles = [_Silent(), _Silent()]
    told = Ranks(store, handles)
    yield told, join_store(address), handles
    told.close()


def test_a_rank_that_disagrees_breaks_the_replica_for_good(
    silent: tuple[Ranks, Store, list[_Silent]],
) -> None:
    told, theirs, handles = silent
    for rank, token in ((1, 4), (2, 5)):
        Channel(theirs, rank, of_rank_0=False).send([("a", (token,))] if rank == 2 else [("a", ())])
    client = Client(ParallelReplica(tiny_replica("llama"), told))  # type: ignore[arg-type]
    with pytest.raises(ReplicaBroken, match=r"rank 2 answered .*\(5,\).* rank 0 \[\('a', \(\)\)\]"):
        client.prefill(a=[4, 5, 6])
    with pytest.raises(ReplicaBroken, match="rank 2 answered"):
        client.prefill(b=[4, 5, 6])
    assert all(handle.killed for handle in handles)
    told.close()
    assert all(handle.left for handle in handles)


def test_a_rank_that_has_ended_is_not_waited_for(
    silent: tuple[Ranks, Store, list[_Silent]],
) -> None:
    told, _, handles = silent
    handles[1].end = "exit code -9"
    client = Client(ParallelReplica(tiny_replica("llama"), told))  # type: ignore[arg-type]
    with pytest.raises(ReplicaBroken, match="rank 2 has ended: exit code -9"):
        client.prefill(a=[4, 5, 6])


# --------------------------------------------------------------------------- messages


def test_messages_arrive_whole_in_order_and_as_what_they_are() -> None:
    store, address = host_store()
    ours, theirs = Channel(store, 1, True), Channel(join_store(address), 1, False)
    row = PrefillRow("é", tuple(range(2_000_000)), 7, Sampling(0.7, seed=2**62), (1,), 3)
    large = Batch(1, "r", BatchKind.PREFILL, prefill=(row,))
    small = Batch(2, "r", BatchKind.SPECULATE, rows=(StepRow("é", 3, 4, 5),))
    for batch in (small, large, None):
        ours.send(batch)
    assert [theirs.receive(Batch | None, 10) for _ in range(3)] == [small, large, None]
    theirs.send(Failure("KeyError", "q_proj"))
    answer = ours.receive(list[int] | Failure, 10)
    assert answer == Failure("KeyError", "whatever is said")
    assert str(answer) == "KeyError: q_proj"
    with pytest.raises(TimeoutError, match=r"no message within 0\.05 s"):
        ours.receive(bool, 0.05)
    theirs.send("no number")
    with pytest.raises(ValidationError):
        ours.receive(int, 10)


# --------------------------------------------------------------------------- loading


follow = parallel.follow


def _lacking(config: ReplicaConfig, rank: int, address: Address) -> None:
    def load(*_: Any) -> Any:
        raise KeyError("q_proj")

    vars(parallel).update(load_rank=load)
    follow(config, rank, address)


def test_what_a_rank_fails_with_while_it_loads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits to meet it."""
    monkeypatch.setattr(parallel, "follow", _lacking)
    with pytest.raises(PairRefused, match=r"rank 1 (failed with|has ended:) KeyError: 'q_proj'"):
        load_parallel(TWO)


def test_a_rank_that_cannot_be_started_ends_those_that_were(tmp_path: Path) -> None:
    sizes = {**SHAPES["tiny"], "num_attention_heads": 6, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    three = config(
        str(tmp_path), tensor_parallel=3, speculative_config="none", num_gpu_blocks_override=1024
    )
    started: list[_Silent] = []

    def start(_config: ReplicaConfig, rank: int, _address: Address) -> _Silent:
        if rank == 2:
            raise BlockingIOError("no process left")
        started.append(_Silent())
        return started[-1]

    with pytest.raises(BlockingIOError, match="no process left"):
        load_parallel(three, start)
    assert [handle.left for handle in started] == [True]


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"memory": 1000}, TooLittleMemory, "do not hold"),
        ({"tensor_parallel": 3}, PairRefused, "num_attention_heads is 4.*3 ranks"),
        ({"tensor_parallel": 4}, PairRefused, "num_key_value_heads is 2, which 4 ranks"),
        ({"device": "cuda:1"}, ValidationError, "device cuda:1 is a single device"),
    ],
)
def test_what_no_rank_can_have_is_refused_before_any_is_started(
    settings: dict[str, Any], error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "start_here", lambda *_args: pytest.fail("a rank was started"))
    with pytest.raises(error, match=match):
        load_parallel(config("tiny", **{"tensor_parallel": 2, **settings}))
