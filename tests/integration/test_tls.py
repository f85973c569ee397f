"""Proves: behind the shipped nginx configuration only those with the right certificates are served,
what they send arrives unchanged, an address of their own goes with it, and limits hold per address.

Real nginx, real TLS, real gRPC; behind it a server that answers without models.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from typer.testing import CliRunner

from cluster.cli.main import main
from cluster.client import NO_RETRY, AsyncClient, Client, RetryPolicy, Tls
from cluster.frontend.http_api.edge import error_body
from protos import lockstep_pb2 as pb, lockstep_pb2_grpc
from tests.cluster.fakes import perfect
from tests.cluster.scripted import PROMPT, PROMPT_IDS, Script, joined
from tests.integration.nginx import (
    NGINX,
    OPENSSL,
    READ,
    WAIT_S,
    Authority,
    Behind,
    Terminator,
    run_nginx,
    serve_behind,
)

pytestmark = pytest.mark.skipif(
    NGINX is None or OPENSSL is None, reason="nginx or openssl is not installed"
)

TOKENS = perfect(PROMPT_IDS, 40)
REQUEST = pb.GenerateRequest(prompt=PROMPT, temperature=0.5, seed=3, stop=["none such"])
QUICK = RetryPolicy(attempts_max=3, backoff_s=0.01, reach_s=5.0)


behind = pytest.fixture(serve_behind, scope="module", name="behind")


@pytest.fixture(autouse=True)
def script(behind: Behind) -> Script:
    behind.servicer.script = Script(list(TOKENS))
    return behind.servicer.script


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
    other = Authority(tmp_path / "other")
    forged = other.issue("somebody", tmp_path / "client")
    rows = [
        (open_to_all, Tls(other.certificate), StatusCode.UNAVAILABLE),
        (open_to_all, None, StatusCode.UNAVAILABLE),
        (closed, None, StatusCode.UNAVAILABLE),
        (closed, closed.anonymous, StatusCode.UNAUTHENTICATED),
        (closed, Tls(closed.files / "ca.crt", *forged), StatusCode.UNAUTHENTICATED),
    ]
    for terminator, tls, code in rows:
        with Client(terminator.address, api_key="secret", tls=tls, retry=QUICK) as client:
            assert refusal(client).code() is code
    assert not script.asked


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


def over_http(
    terminator: Terminator, path: str, body: bytes | None = None, known: bool = False
) -> Any:
    """The answer, to be read. Raises HTTPError."""
    context = ssl.create_default_context(cafile=str(terminator.files / "ca.crt"))
    if known:
        context.load_cert_chain(terminator.files / "client.crt", terminator.files / "client.key")
    headers = {"authorization": "Bearer secret", "content-type": "application/json"}
    request = urllib.request.Request(f"https://{terminator.address}{path}", body, headers)
    return urllib.request.urlopen(request, context=context, timeout=2 * WAIT_S)


def test_http_routes_pass_and_others_do_not(open_to_all: Terminator) -> None:
    for path in ("/healthz", "/readyz"):
        with over_http(open_to_all, path) as answer:
            assert json.load(answer)["path"] == path
    with over_http(open_to_all, "/v1/completions", b'{"prompt": "x"}') as answer:
        seen = json.load(answer)
    assert seen["body"] == '{"prompt": "x"}'
    assert seen["headers"]["authorization"] == "Bearer secret"
    assert seen["headers"]["x-real-ip"] == "127.0.0.1"
    with pytest.raises(urllib.error.HTTPError) as caught:
        over_http(open_to_all, "/-/routes")
    assert caught.value.code == 404


def test_an_http_stream_passes_as_it_comes(open_to_all: Terminator) -> None:
    READ.clear()
    with over_http(open_to_all, "/v1/chat/completions", b"{}") as answer:
        assert answer.readline() == b"first\n"
        READ.set()
        assert answer.readline() == b"second\n"


def test_the_closed_variant_wants_certificates_over_http_too(closed: Terminator) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        over_http(closed, "/healthz")
    assert caught.value.code == 401
    with over_http(closed, "/healthz", known=True) as answer:
        assert answer.status == 200


# --------------------------------------------------------------------------- limits


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory, behind: Behind) -> Iterator[Terminator]:
    """With limits that a test can reach, on calls at once and on headers that do not come."""
    lower = {
        "limit_conn calls_at_once 1024;": "limit_conn calls_at_once 1;",
        "client_header_timeout 10s;": "client_header_timeout 1s;",
    }
    yield from run_nginx(tmp_path_factory.mktemp("tight"), behind, lower)


TOO_MANY_GRPC = (StatusCode.RESOURCE_EXHAUSTED, "1")
TOO_MANY_HTTP = (
    429,
    "1",
    error_body("RESOURCE_EXHAUSTED", "too many calls from this address", 429),
)


def over_grpc(terminator: Terminator) -> tuple[StatusCode, str | None]:
    """The code of one call, which is not made again, and after how long it may be."""
    with Client(terminator.address, tls=terminator.anonymous, retry=NO_RETRY) as client:
        try:
            client.generate(REQUEST)
        except grpc.RpcError as error:
            return error.code(), dict(error.trailing_metadata()).get("retry-after")
    return StatusCode.OK, None


def refused_over_http(terminator: Terminator) -> tuple[int, str | None, Any] | None:
    try:
        over_http(terminator, "/v1/models").close()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["retry-after"], json.load(error)
    return None


def test_more_calls_than_the_rate_allows_are_refused(tmp_path: Path, behind: Behind) -> None:
    # One at once and one more within the minute.
    lower = {"rate=100r/s": "rate=1r/m", "burst=400": "burst=1"}
    for terminator in run_nginx(tmp_path, behind, lower):
        served_twice = [over_grpc(terminator) for _ in range(2)]
        assert served_twice == [(StatusCode.OK, None)] * 2
        assert over_grpc(terminator) == TOO_MANY_GRPC
        assert refused_over_http(terminator) == TOO_MANY_HTTP


def test_more_calls_at_once_than_allowed_are_refused_and_the_others_go_on(
    tight: Terminator,
) -> None:
    READ.clear()
    with over_http(tight, "/v1/chat/completions", b"{}") as running:
        assert running.readline() == b"first\n"
        assert over_grpc(tight) == TOO_MANY_GRPC
        assert refused_over_http(tight) == TOO_MANY_HTTP
        READ.set()
        assert running.readline() == b"second\n"
    # nginx forgets the call a moment after its end.
    deadline_s = time.monotonic() + WAIT_S
    while refused_over_http(tight):
        assert time.monotonic() < deadline_s


def test_headers_that_are_too_large_or_do_not_come_end_the_call(tight: Terminator) -> None:
    host, port = tight.address.split(":")
    context = ssl.create_default_context(cafile=str(tight.files / "ca.crt"))
    # Three of these have room in nginx's own buffers, which hold more than ours.
    large = "".join(f"x-{number}: {'y' * 7000}\r\n" for number in range(3))
    for headers, answer in ((large + "\r\n", b"HTTP/1.1 400 "), ("x-1: y", b"")):
        with (
            socket.create_connection((host, int(port)), WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            secure.sendall(f"GET /healthz HTTP/1.1\r\nhost: {host}\r\n{headers}".encode())
            assert secure.recv(len(b"HTTP/1.1 400 ")) == answer


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
