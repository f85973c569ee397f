"""Proves: ranks that share the width of each expert, latent attention, windows and sinks compute
together what one device does, and parts that do not fit together are found at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replicas.config import ReplicaConfig
from replicas.errors import PairRefused
from replicas.models.weights import rank_weights
from replicas.parallel import parallel_replica as parallel
from replicas.parallel.parallel_replica import load_parallel
from replicas.parallel.rendezvous import Address
from replicas.replica import Replica
from tests.oracle.test_families import KINDS
from tests.replicas.families import family_model
from tests.replicas.parallel.conftest import Load
from tests.replicas.parallel.planted import config, run
from tests.tiny_pairs import VOCAB


def settings(folder: Path, kind: str, **more: Any) -> ReplicaConfig:
    family_model(kind).config.save_pretrained(folder)
    target = f"planted:{folder}?scale=0.8"
    return config("tiny", target=target, speculative_config={"method": "suffix"}, **more)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "qwen3_moe" else pytest.mark.slow) for kind in KINDS],
)
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, kind: str, load: Load) -> None:
    one = settings(tmp_path, kind)
    single, double = Replica.load(one), load(one.model_copy(update={"tensor_parallel": 2}))
    for batch, k in ((1, 0), (4, 4)):
        assert run(double, batch, k, VOCAB) == run(single, batch, k, VOCAB)
    assert double.residents == ()


follow = parallel.follow
_divide_experts = rank_weights._divide_experts


def _divided_wrong(name: str, module: Any, rank: int, ranks: int) -> None:
    """The last product's weight is that of the rank before."""
    whole = module.down_proj.data
    inner = whole.shape[2] // ranks
    _divide_experts(name, module, rank, ranks)
    module.down_proj.data = whole[:, :, (rank - 1) * inner : rank * inner].clone()


def _wrong(config: ReplicaConfig, rank: int, address: Address) -> None:
    vars(rank_weights).update(_divide_experts=_divided_wrong)
    follow(config, rank, address)


@pytest.mark.usefixtures("_forked")
def test_an_experts_weight_of_another_rank_is_found_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "follow", _wrong)
    with pytest.raises(PairRefused, match="parts on several devices do not give together"):
        load_parallel(settings(tmp_path, "qwen3_moe", tensor_parallel=2))
