"""Proves: behind the shipped nginx configuration only those with the right certificates are served,
what they send arrives unchanged, and an address of their own goes with it.

Real nginx, real TLS, real gRPC; behind it a server that answers without models.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from cluster.cli.main import main
from cluster.client import NO_RETRY, AsyncClient, Client, RetryPolicy, Tls
from protos import lockstep_pb2 as pb, lockstep_pb2_grpc
from tests.cluster.fakes import perfect
from tests.cluster.scripted import PROMPT, PROMPT_IDS, Script, Server, joined
from tests.free_ports import free_port
from tests.integration.certificates import Authority

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")

SHIPPED = Path(__file__).parents[2] / "deploy" / "tls"
TOKENS = perfect(PROMPT_IDS, 40)
REQUEST = pb.GenerateRequest(prompt=PROMPT, temperature=0.5, seed=3, stop=["none such"])
WAIT_S = 60.0
"""For anything that takes no time."""
READ = threading.Event()
"""The first line of a stream has been read."""
QUICK = RetryPolicy(attempts_max=3, backoff_s=0.01, reach_s=5.0)


class JsonHandler(http.server.BaseHTTPRequestHandler):
    """What a caller sent, as JSON."""

    def do_GET(self) -> None:
        self._answer({"path": self.path})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        if self.path == "/v1/chat/completions":
            self._stream()
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._answer({"path": self.path, "body": body, "headers": headers})

    def _stream(self) -> None:
        """A line, and another when the first has been read."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"first\n")
        self.wfile.flush()
        self.wfile.write(b"second\n" if READ.wait(WAIT_S / 4) else b"not read\n")

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


@dataclass(frozen=True)
class Behind:
    """The servers behind the terminator."""

    servicer: Server
    server: grpc.Server
    grpc_port: int
    http_port: int


@pytest.fixture(scope="module")
def behind() -> Iterator[Behind]:
    servicer = Server()
    # As Serve's proxies are set up: whatever nginx lets through is theirs to take. With gRPC's own
    # limit the server may refuse by the message's length before nginx has seen too much of it.
    options = [("grpc.max_receive_message_length", 16 << 20)]
    server = grpc.server(ThreadPoolExecutor(8), options=options)
    lockstep_pb2_grpc.add_LockstepServicer_to_server(servicer, server)
    states = health.HealthServicer()
    states.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), JsonHandler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield Behind(servicer, server, grpc_port, web.server_port)
    web.shutdown()
    server.stop(None)


@pytest.fixture(autouse=True)
def script(behind: Behind) -> Script:
    behind.servicer.script = Script(list(TOKENS))
    return behind.servicer.script


@dataclass(frozen=True)
class Terminator:
    address: str
    files: Path
    """Holds ca.crt, client.crt and client.key."""

    @property
    def anonymous(self) -> Tls:
        return Tls(self.files / "ca.crt")

    @property
    def known(self) -> Tls:
        return Tls(self.files / "ca.crt", self.files / "client.crt", self.files / "client.key")


def run_nginx(root: Path, behind: Behind, replaced: dict[str, str]) -> Iterator[Terminator]:
    """The shipped files with other ports, and with the replacements that a variant asks for."""
    port = free_port()
    shutil.copytree(SHIPPED, root, dirs_exist_ok=True)
    certs = root / "certs"
    certs.mkdir()
    authority, clients = Authority("test authority"), Authority("test clients")
    authority.write(root / "ca.crt")
    authority.issue("localhost", certs / "server.crt", certs / "server.key")
    clients.write(certs / "clients.crt")
    clients.issue("somebody", root / "client.crt", root / "client.key")
    text = (root / "nginx.conf").read_text()
    for old, new in {
        "listen 9443 ": f"listen 127.0.0.1:{port} ",
        "server 127.0.0.1:9000;": f"server 127.0.0.1:{behind.grpc_port};",
        "server 127.0.0.1:8000;": f"server 127.0.0.1:{behind.http_port};",
        "worker_processes auto;": "worker_processes 1;",
        **replaced,
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (root / "nginx.conf").write_text(text)
    log = (root / "stderr.log").open("w+")
    command = [str(NGINX), "-p", str(root), "-c", str(root / "nginx.conf"), "-g", "daemon off;"]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            assert process.poll() is None, (root / "stderr.log").read_text()
            assert time.monotonic() < deadline_s, "nginx does not listen"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.02)
        yield Terminator(f"localhost:{port}", root)
    finally:
        process.terminate()
        process.wait(WAIT_S)
        log.close()


@pytest.fixture(scope="module")
def open_to_all(tmp_path_factory: pytest.TempPathFactory, behind: Behind) -> Iterator[Terminator]:
    """As shipped."""
    yield from run_nginx(tmp_path_factory.mktemp("open"), behind, {})


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory, behind: Behind) -> Iterator[Terminator]:
    """With the switch for client certificates."""
    switch = {"# include client-certificates.conf;": "include client-certificates.conf;"}
    yield from run_nginx(tmp_path_factory.mktemp("closed"), behind, switch)


def served(client: Client) -> None:
    """Unary call, stream and health."""
    assert list(client.generate(REQUEST).token_ids) == TOKENS
    assert joined(list(client.stream(REQUEST)))[1] == TOKENS
    assert client.ready()


def refusal(client: Client) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as unary:
        client.generate(REQUEST)
    with pytest.raises(grpc.RpcError) as stream:
        list(client.stream(REQUEST))
    assert stream.value.code() is unary.value.code()
    assert not client.ready()
    return unary.value


# --------------------------------------------------------------------------- certificates


def test_right_certificates_are_served(
    open_to_all: Terminator, closed: Terminator, script: Script
) -> None:
    async def chunks() -> list[pb.GenerateChunk]:
        async with AsyncClient(open_to_all.address, tls=open_to_all.anonymous) as client:
            return [chunk async for chunk in client.stream(REQUEST)]

    for terminator, tls in ((open_to_all, open_to_all.anonymous), (closed, closed.known)):
        with Client(terminator.address, tls=tls, retry=NO_RETRY) as client:
            served(client)
    assert joined(asyncio.run(chunks()))[1] == TOKENS
    assert list(script.asked) == [REQUEST] * 5


def test_all_others_are_refused(
    open_to_all: Terminator, closed: Terminator, tmp_path: Path, script: Script
) -> None:
    other = Tls(Authority("somebody else").write(tmp_path / "other.crt"))
    forged = Authority("test clients").issue(
        "somebody", tmp_path / "client.crt", tmp_path / "client.key"
    )
    rows = [
        (open_to_all, other, StatusCode.UNAVAILABLE),
        (open_to_all, None, StatusCode.UNAVAILABLE),
        (closed, None, StatusCode.UNAVAILABLE),
        (closed, closed.anonymous, StatusCode.UNAUTHENTICATED),
        (closed, Tls(closed.files / "ca.crt", *forged), StatusCode.UNAUTHENTICATED),
    ]
    for terminator, tls, code in rows:
        with Client(terminator.address, api_key="secret", tls=tls, retry=QUICK) as client:
            assert refusal(client).code() is code
    assert not script.asked


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ],
)
def test_old_versions_of_tls_are_refused(
    open_to_all: Terminator, version: ssl.TLSVersion, accepted: bool
) -> None:
    context = ssl.create_default_context(cafile=str(open_to_all.files / "ca.crt"))
    # The client would take the old one, security level included: the server must not.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    host, port = open_to_all.address.split(":")

    def shake_hands() -> str | None:
        with (
            socket.create_connection((host, int(port)), WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            return secured.version()

    if accepted:
        assert shake_hands() == {"TLSv1_2": "TLSv1.2", "TLSv1_3": "TLSv1.3"}[version.name]
    else:
        with pytest.raises(ssl.SSLError):
            shake_hands()


# --------------------------------------------------------------------------- what passes


def test_the_key_goes_on_and_an_address_that_the_client_cannot_forge(
    open_to_all: Terminator, script: Script
) -> None:
    credentials = open_to_all.anonymous.credentials()
    with grpc.secure_channel(open_to_all.address, credentials) as channel:
        key = ("authorization", "Bearer secret")
        forged = (("x-real-ip", "10.0.0.1"), ("x-forwarded-for", "10.0.0.1"))
        for sent in ((key,), (key, *forged)):
            lockstep_pb2_grpc.LockstepStub(channel).Generate(REQUEST, metadata=sent)
    assert len(script.metadata) == 2
    for seen in script.metadata:
        assert seen["authorization"] == "Bearer secret"
        assert seen["x-real-ip"] == seen["x-forwarded-for"] == "127.0.0.1"


def test_trailing_metadata_comes_back(open_to_all: Terminator, script: Script) -> None:
    script.cuts = [(0, StatusCode.RESOURCE_EXHAUSTED, "full")]
    script.trailing = (("retry-after", "7"),)
    tls = open_to_all.anonymous
    with (
        Client(open_to_all.address, tls=tls, retry=NO_RETRY) as client,
        pytest.raises(grpc.RpcError) as caught,
    ):
        client.generate(REQUEST)
    assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after", "7") in [tuple(pair) for pair in caught.value.trailing_metadata()]


def test_chunks_are_not_held_back(open_to_all: Terminator, behind: Behind, script: Script) -> None:
    """The first chunk arrives while the server still waits to give the second."""
    go_on = threading.Event()

    class Slow(Script):
        @property
        def sizes(self) -> Iterator[int]:  # type: ignore[override]
            yield 1
            assert go_on.wait(WAIT_S), "the first chunk did not arrive"
            yield from [1] * len(TOKENS)

        @sizes.setter
        def sizes(self, _value: object) -> None:
            pass

    behind.servicer.script = Slow(list(TOKENS))
    tokens: list[int] = []
    with Client(open_to_all.address, tls=open_to_all.anonymous, retry=NO_RETRY) as client:
        for chunk in client.stream(REQUEST):
            tokens.extend(chunk.token_ids)
            go_on.set()
    assert tokens == TOKENS


def test_a_request_that_is_too_large_is_the_callers_mistake(open_to_all: Terminator) -> None:
    large = pb.GenerateRequest(prompt="x" * (5 << 20))
    with Client(open_to_all.address, tls=open_to_all.anonymous, retry=QUICK) as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.generate(large)
        assert caught.value.code() is StatusCode.INVALID_ARGUMENT
        served(client)


def test_http_routes_pass_and_others_do_not(open_to_all: Terminator) -> None:
    context = ssl.create_default_context(cafile=str(open_to_all.files / "ca.crt"))
    base = f"https://{open_to_all.address}"

    def ask(path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"authorization": "Bearer secret", "content-type": "application/json"}
        request = urllib.request.Request(base + path, body, headers)
        with urllib.request.urlopen(request, context=context, timeout=WAIT_S) as answer:
            read: dict[str, Any] = json.load(answer)
            return read

    for path in ("/healthz", "/readyz"):
        assert ask(path)["path"] == path
    answer = ask("/v1/completions", b'{"prompt": "x"}')
    assert answer["body"] == '{"prompt": "x"}'
    assert answer["headers"]["authorization"] == "Bearer secret"
    assert answer["headers"]["x-real-ip"] == "127.0.0.1"
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask("/-/routes")
    assert caught.value.code == 404


def test_an_http_stream_passes_as_it_comes(open_to_all: Terminator) -> None:
    context = ssl.create_default_context(cafile=str(open_to_all.files / "ca.crt"))
    READ.clear()
    url = f"https://{open_to_all.address}/v1/chat/completions"
    with urllib.request.urlopen(url, b"{}", context=context, timeout=2 * WAIT_S) as answer:
        assert answer.readline() == b"first\n"
        READ.set()
        assert answer.readline() == b"second\n"


def test_the_closed_variant_wants_certificates_over_http_too(closed: Terminator) -> None:
    context = ssl.create_default_context(cafile=str(closed.files / "ca.crt"))
    url = f"https://{closed.address}/healthz"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, context=context, timeout=WAIT_S)
    assert caught.value.code == 401
    context.load_cert_chain(closed.files / "client.crt", closed.files / "client.key")
    with urllib.request.urlopen(url, context=context, timeout=WAIT_S) as answer:
        assert answer.status == 200


# --------------------------------------------------------------------------- the command


def test_the_command_speaks_tls_with_a_key_from_a_file(
    closed: Terminator, tmp_path: Path, script: Script
) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = [
        *("--address", closed.address, "--api-key-file", str(key)),
        *("--tls-ca", str(closed.files / "ca.crt")),
        *("--tls-cert", str(closed.files / "client.crt")),
        *("--tls-key", str(closed.files / "client.key")),
    ]
    result = CliRunner().invoke(main, ["generate", PROMPT, "--json", *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["token_ids"] == TOKENS
    assert script.metadata[0]["authorization"] == "Bearer secret"
