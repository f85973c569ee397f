"""Proves: docs/security.md tells all that is open. Its table of sockets is what the processes of
`lockstep serve` listen on, and its list of what is served without a key is what the server answers.
"""

from __future__ import annotations

import http.client
import re
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from ray.serve.generated import serve_pb2

from cluster.config import ClusterConfig
from cluster.frontend.http_api.app import http_app
from cluster.frontend.service import FrontendService
from protos import lockstep_pb2 as pb
from replicas.config import ReplicaConfig
from tests.cluster.fakes import load_fake_text
from tests.integration.conftest import Keyed

pytestmark = pytest.mark.ray

SECURITY = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
CALL_S = 60.0
Socket = tuple[str, str]
"""The process that listens, and on what."""


def table(head: str) -> list[list[str]]:
    """The rows of the table in docs/security.md whose first line begins so."""
    _, _, rest = SECURITY.partition(f"\n| {head} |")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    assert lines
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


# --------------------------------------------------------------------------- sockets


def listening(root: int) -> Iterator[tuple[psutil.Process, str, int]]:
    """Of the process and all that it has started: who listens on which address and port."""
    parent = psutil.Process(root)
    for process in [parent, *parent.children(recursive=True)]:
        try:
            for found in process.net_connections("inet"):
                if found.status == psutil.CONN_LISTEN:
                    yield process, found.laddr.ip.removeprefix("::ffff:"), found.laddr.port
        except psutil.NoSuchProcess:
            continue


def name_of(process: psutil.Process, root: int) -> str:
    """As the table has it: the last part of what Ray calls it, or the script or file that runs."""
    first, *others = process.cmdline()
    if process.pid == root:
        return "lockstep"
    if first.startswith("ray::"):
        # Behind the name a dot and the method that runs just then.
        return first.split()[0].split(":")[-1].partition(".")[0]
    scripts = [word for word in others if word.endswith(".py")]
    return Path(scripts[0] if scripts else first).stem


def where(ip: str) -> str:
    if ip in ("::", "0.0.0.0"):
        return "all"
    return "loopback" if ip.startswith("127.") or ip == "::1" else "node"


def without_idle(sockets: Counter[Socket]) -> Counter[Socket]:
    """Workers that Ray keeps for what may come are there or not."""
    idle = {key for key in sockets if key[0] == "IDLE"}
    assert idle <= {("IDLE", "all")}
    return Counter({key: sockets[key] for key in sockets.keys() - idle})


def told_of(ports: set[int]) -> list[list[str]]:
    """The rows of the table, for processes that listen on these ports. Some of Ray's are the same
    for all Rays; where another Ray of this machine has such a port, ours does without."""
    return [row for row in table("process") if not _of_another_ray(row[2], ports)]


def _of_another_ray(what: str, ports: set[int]) -> bool:
    fixed = re.search(r"port (\d{5})", what)
    if fixed is None or int(fixed[1]) in ports:
        return False
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(fixed[1]))) == 0


def test_the_table_has_every_socket_and_no_other(keyed: Keyed) -> None:
    root = keyed.process.pid
    sockets = list(listening(root))
    told: Counter[Socket] = Counter()
    for processes, address, *_ in told_of({port for *_, port in sockets}):
        # The fixture's server listens to every address.
        address = {"`http_host`": "all"}.get(address, address)
        told.update((process, address) for process in processes.split(", "))
    found = Counter((name_of(process, root), where(ip)) for process, ip, _ in sockets)
    assert without_idle(found) == without_idle(told)


def test_the_table_says_which_sockets_answer_strangers_over_http(keyed: Keyed) -> None:
    """Metrics, and the HTTP port; all other HTTP is 401."""
    root = keyed.process.pid
    sockets = list(listening(root))
    told = Counter(
        process
        for process, _, what, answers in told_of({port for *_, port in sockets})
        if answers.startswith("**open**") and not what.startswith("gRPC")
    )
    found: Counter[str] = Counter()
    for process, ip, port in sockets:
        host = "127.0.0.1" if where(ip) == "all" else ip
        connection = http.client.HTTPConnection(host, port, timeout=CALL_S)
        try:
            connection.request("GET", "/")
            found[name_of(process, root)] += connection.getresponse().status != 401
        except (http.client.HTTPException, ConnectionError):
            pass  # It speaks gRPC.
        finally:
            connection.close()
    assert +found == told


# --------------------------------------------------------------------------- without a key


def names(protocol: str) -> set[str]:
    """What the list has in backquotes."""
    [cell] = [text for name, text in table("protocol") if name == protocol]
    return set(re.findall(r"`([^`]+)`", cell))


def test_the_list_has_every_path_that_is_served_without_a_key(keyed: Keyed) -> None:
    service = FrontendService(ClusterConfig(), [], load_fake_text(ReplicaConfig()), "frontend")
    listed = http_app(service).openapi()["paths"].items()
    paths = [(path, method.upper()) for path, methods in listed for method in methods]
    assert ("/v1/completions", "POST") in paths
    found = set()
    for path, method in [*paths, ("/-/healthz", "GET"), ("/-/routes", "GET")]:
        connection = http.client.HTTPConnection("127.0.0.1", keyed.http_port, timeout=CALL_S)
        headers = {"content-type": "application/json"}
        connection.request(method, re.sub(r"{\w+(:path)?}", "x", path), b"{}", headers)
        if connection.getresponse().status != 401:
            found.add(path)
        connection.close()
    assert found == names("HTTP")


def test_the_list_has_every_method_that_is_served_without_a_key(keyed: Keyed) -> None:
    methods: list[MethodDescriptor] = [
        method
        for file in (pb, health_pb2, serve_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    found: dict[str, grpc.StatusCode] = {}
    with grpc.insecure_channel(f"localhost:{keyed.grpc_port}") as channel:
        for method in methods:
            name = f"{method.containing_service.full_name}/{method.name}"
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            try:
                answer = make(f"/{name}")(b"", timeout=CALL_S)
                if method.server_streaming:
                    list(answer)
                found[name] = grpc.StatusCode.OK
            except grpc.RpcError as error:
                found[name] = error.code()
    closed = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
    assert {name for name, code in found.items() if code not in closed} == names("gRPC")
