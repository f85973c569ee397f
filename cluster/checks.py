"""What is wrong with settings, found before anything that runs is touched; reads no weights.

What depends on files is checked where replicas may run: a head node often has no models.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ClusterConfig, ConfigError
from cluster.frontend.admission import keys
from cluster.worker.resources import gpus_of
from replicas.errors import PairRefused, TooLittleMemory

log = logging.getLogger("ray.serve")

_NODES_S = 90.0
"""How long the nodes may take; on a busy machine the import of torch alone takes a while."""
_NODES_MAX = 8
"""More are as likely to have the same files."""


def check_files(config: ClusterConfig) -> None:
    """Paths of models that are none, and the file of keys, on this machine. Raises ConfigError."""
    replica = config.replica
    for name, model in (
        ("replica.target", replica.target),
        ("replica.speculative_config.model", replica.drafting.model),
    ):
        if model and model.startswith(("/", "./", "../", "~")) and not Path(model).exists():
            raise ConfigError(f"{name}: {model}: no such file or directory")
    if config.auth.keys_file is not None:
        try:
            keys.read(Path(config.auth.keys_file))
        except OSError as error:
            raise ConfigError(f"auth.keys_file: {error}") from None


def check_pair(config: ClusterConfig) -> None:
    """Target and drafter by their configs, and whether they fit into the memory that the settings
    give, or into that of this machine's CPUs. Raises ConfigError."""
    check_files(config)
    import torch

    from replicas.memory import plan_memory
    from replicas.pair import read_pair

    replica = config.planned_replica
    try:
        pair = read_pair(replica)
        sized = replica.memory is not None or replica.num_gpu_blocks_override is not None
        # What is free on a GPU says nothing while what is to be replaced is still there.
        if replica.device == "cpu" or sized:
            device = "cpu" if replica.device == "auto" else replica.device
            plan_memory(replica, pair.shape, torch.device(device), loaded=False)
    except (PairRefused, TooLittleMemory, OSError, ValueError) as error:
        raise ConfigError(str(error)) from None


def check_on_nodes(config: ClusterConfig) -> None:
    """`check_pair` on the nodes of this Ray that could hold a replica; one must have nothing to
    say. Where there is none yet, or none answers, nothing is known. Raises ConfigError."""
    needs = {"GPU": gpus_of(config), "CPU": config.actors.replica_cpus}
    nodes = [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"]
        and all(node["Resources"].get(name, 0.0) >= number for name, number in needs.items())
    ]
    check = ray.remote(_problem)
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes[:_NODES_MAX]]
    asked = [check.options(scheduling_strategy=place, **options).remote(config) for place in places]
    waiting: list[Any] = asked
    problems: list[str] = []
    while waiting:
        done, waiting = ray.wait(waiting, timeout=_NODES_S)
        if not done:
            break
        try:
            problem: str = ray.get(done[0])
        except ray.exceptions.RayError as error:
            log.warning("a node could not check the settings: %s", error)
            continue
        if not problem:
            break
        problems.append(problem)
    else:
        if problems:
            raise ConfigError(problems[0])
    for late in waiting:
        ray.cancel(late, force=True)


def _problem(config: ClusterConfig) -> str:
    try:
        check_pair(config)
    except ConfigError as error:
        return str(error)
    return ""


def check_port(name: str, host: str, port: int) -> None:
    """Raises ConfigError where the port is taken, or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # A connection that has just ended does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{name}: port {port} of {host}: {error.strerror}") from None


def check_ports(config: ClusterConfig) -> None:
    """Those of this machine's proxies. Raises ConfigError."""
    server = config.server
    check_port("server.http_port", server.http_host, server.http_port)
    check_port("server.grpc_port", "0.0.0.0", server.grpc_port)
