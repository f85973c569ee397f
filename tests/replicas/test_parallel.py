"""Proves that a replica on two ranks (processes that talk gloo) is a replica on one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from cluster.local_engine import LocalEngine
from replicas.config import ReplicaConfig
from replicas.pair import PairRefused
from replicas.parallel import ParallelReplica, ReplicaBroken, load_parallel
from replicas.replica import Replica
from replicas.shapes import SHAPES
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, SamplingParams
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
    single = Replica.load(settings)
    double = load_parallel(settings.model_copy(update={"tensor_parallel": 2}))
    loaded.append(double)
    assert double.spec == single.spec
    for batch, k in ((1, 0), (4, 3), (3, 2)):
        assert run(double, batch, k) == run(single, batch, k)
    assert double.residents == ()


def test_a_rank_that_ends_breaks_the_replica_at_once(loaded: list[ParallelReplica]) -> None:
    double = load_parallel(config("tiny", tensor_parallel=2))
    loaded.append(double)
    expected = run(double, 2, 2)
    assert len(expected) == 5
    process = double._processes[0]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    with pytest.raises(ReplicaBroken, match="a rank is gone"):
        run(double, 2, 2)


class Disagreeing:
    """The pipe to a rank that commits something else."""

    def send(self, message: object) -> None:
        pass

    def recv(self) -> object:
        return [("a", (1, 2, 3))]


def test_a_rank_that_disagrees_breaks_the_replica_for_good() -> None:
    replica = ParallelReplica(tiny_replica("llama"), [Disagreeing()], [], None)  # type: ignore
    client = Client(replica)  # type: ignore[arg-type]
    with pytest.raises(
        ReplicaBroken, match=r"rank 1 answered .*1, 2, 3.* rank 0 \[\('a', \(\)\)\]"
    ):
        client.prefill(a=[4, 5, 6])
    with pytest.raises(ReplicaBroken, match="rank 1 answered"):
        client.prefill(b=[4, 5, 6])


def test_deterministic_holds_on_two_ranks_which_end_with_their_caller() -> None:
    double = load_parallel(config("tiny", tensor_parallel=2, dtype="bfloat16", deterministic=True))
    assert run(double, 1, 0) == run(double, 5, 4) == run(double, 3, 1)
    process = double._processes[0]
    double.close()
    assert process.exitcode == 0


def test_what_cannot_be_divided_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(PairRefused, match=r"tensor_parallel: num_attention_heads is 4.*3 ranks"):
        load_parallel(config("tiny", tensor_parallel=3))
    with pytest.raises(PairRefused, match="num_key_value_heads is 2, which 4 ranks"):
        load_parallel(config("tiny", tensor_parallel=4))
    with pytest.raises(ValidationError, match="tensor_parallel: device cuda:1 is one of several"):
        ReplicaConfig(device="cuda:1", tensor_parallel=2)
