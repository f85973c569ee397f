"""Proves: replicas ask Ray for the right GPUs, and several ranks for a placement group."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from cluster.app import build_app
from cluster.config_sources import from_args

APART = {"method": "draft_model", "model": "tiny", "draft_device": "cuda"}
"""A draft model with a GPU of its own."""


def deployed_replicas(settings: dict[str, Any]) -> Any:
    """Serve's deployment of them."""
    return build_app(from_args(settings))._bound_deployment.init_args[2]._bound_deployment


@pytest.mark.parametrize(
    ("settings", "machine", "each"),
    [
        ({"replica.device": "cuda", "replicas": 2}, 1, 1.0),
        ({"replica.device": "cuda:1"}, 2, 0.0),
        ({"replica.device": "cpu"}, 8, 0.0),
        ({"replica.device": "auto"}, 0, 0.0),
        ({"replica.device": "auto"}, None, 0.0),
        ({"replica.device": "auto", "replicas": 2}, 8, 1.0),
        ({"replica.device": "auto", "replicas": 2}, 1, 0.5),
        ({"replica.device": "auto", "replicas": 4}, 3, 0.5),
        ({"replica.device": "auto", "replicas": 3}, 1, 0.3333),
        ({"replica.device": "cuda", "actors": {"replica_gpus": 0.25}}, 1, 0.25),
        ({"replica": {"device": "cuda", "speculative_config": APART}}, 2, 2.0),
        ({"replica": {"device": "auto", "speculative_config": APART}, "replicas": 4}, 2, 2.0),
        ({"replica": {"device": "cpu", "speculative_config": APART}}, 2, 0.0),
        ({"replica": {"device": "cuda", "tensor_parallel": 2}}, 0, 1.0),
        ({"replica": {"device": "auto", "tensor_parallel": 2}}, 4, 1.0),
        ({"replica": {"device": "auto", "tensor_parallel": 2}}, 0, 0.0),
        ({"replica": {"device": "cpu", "tensor_parallel": 2}}, 4, 0.0),
    ],
)
def test_gpus_of_a_replica(
    settings: dict[str, Any], machine: int | None, each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`machine`: GPUs that Ray knows; None: there is no Ray yet."""
    monkeypatch.setattr(ray, "is_initialized", lambda: machine is not None)
    resources = {"GPU": machine} if machine else {}
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": resources}])
    replicas = deployed_replicas(settings)
    assert replicas.ray_actor_options["num_gpus"] == each
    # Of its memory, too: the first to load must not take all that is free.
    told = replicas.init_args[0].replica.gpu_memory_utilization
    assert told == (each if 0 < each < 1 else None)


@pytest.mark.parametrize(
    ("settings", "bundle", "strategy"),
    [
        ({"replica.device": "cuda"}, {"CPU": 0.1, "GPU": 1.0}, "STRICT_PACK"),
        (
            {"replica.device": "cuda", "actors": {"ranks_strategy": "PACK"}},
            {"CPU": 0.1, "GPU": 1.0},
            "PACK",
        ),
        ({"replica.device": "cpu", "actors": {"replica_cpus": 2}}, {"CPU": 2.0}, "STRICT_PACK"),
        # Ray refuses a bundle of nothing.
        ({"replica.device": "cpu", "actors": {"replica_cpus": 0}}, {"CPU": 0.001}, "STRICT_PACK"),
    ],
)
def test_ranks_have_a_bundle_each_in_the_placement_group_of_their_replica(
    settings: dict[str, Any], bundle: dict[str, float], strategy: str
) -> None:
    deployment = deployed_replicas({**settings, "replica.tensor_parallel": 3})
    wanted = deployment._replica_config
    assert wanted.placement_group_bundles == [bundle] * 3
    assert wanted.placement_group_strategy == strategy
    # The replica itself is rank 0, in the first bundle.
    assert deployment.ray_actor_options["num_gpus"] == bundle.get("GPU", 0.0)
    assert deployed_replicas(settings)._replica_config.placement_group_bundles is None


@pytest.mark.parametrize(
    ("settings", "nodes", "replicas", "frontends"),
    [
        # A GPU more than the replicas have, or none.
        ({"replica": {"device": "cuda"}}, [{"CPU": 4.0, "GPU": 2.0}], 100, 100),
        ({"replica": {"device": "cuda"}}, [{"CPU": 4.0, "GPU": 1.0}], 0, 100),
        ({"replica": {"device": "cuda"}, "replicas": 4}, [{"CPU": 4.0, "GPU": 8.0}], 25, 100),
        # Told otherwise: nodes will come.
        (
            {"replica": {"device": "cuda"}, "actors": {"surge": True}},
            [{"CPU": 4.0, "GPU": 1.0}],
            *(100, 100),
        ),
        ({"actors": {"surge": False}}, [{"CPU": 4.0}], 0, 100),
        # In Ray's books there is no CPU for one more.
        ({"actors": {"frontend_cpus": 3.0}}, [{"CPU": 4.0}, {"CPU": 1.0}], 100, 0),
        ({"actors": {"replica_cpus": 2.0}}, [{"CPU": 3.0}], 0, 100),
        # Of a rank each, on any nodes.
        (
            {"replica": {"device": "cuda", "tensor_parallel": 2}},
            [{"CPU": 4.0, "GPU": 2.0}] * 2,
            *(100, 100),
        ),
        ({"replica": {"device": "cuda"}}, None, 0, 100),
        ({"replica": {"device": "cpu"}}, None, 100, 100),
    ],
)
def test_a_change_starts_beside_what_it_replaces_where_ray_has_a_place(
    settings: dict[str, Any],
    nodes: list[dict[str, float]] | None,
    replicas: int,
    frontends: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`nodes`: their resources; None: there is no Ray yet."""
    monkeypatch.setattr(ray, "is_initialized", lambda: nodes is not None)
    found = [{"Alive": True, "Resources": node} for node in nodes or ()]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    app = build_app(from_args(settings))._bound_deployment
    assert app._deployment_config.max_surge_percent == frontends
    deployed = deployed_replicas(settings)
    assert deployed._deployment_config.max_surge_percent == replicas
    # A replica that goes knows whether another one is there.
    assert deployed.init_args[0].actors.surge == (replicas > 0)
