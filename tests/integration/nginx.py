"""nginx with the shipped configuration, certificates for it, and servers behind it that answer
without models. Certificates are for this machine.
"""

from __future__ import annotations

import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster.client import Tls
from protos import lockstep_pb2_grpc
from tests.cluster.scripted import Server
from tests.free_ports import free_port

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
OPENSSL = shutil.which("openssl")
SHIPPED = Path(__file__).parents[2] / "deploy" / "tls"
WAIT_S = 60.0
"""For anything that takes no time."""
READ = threading.Event()
"""The first line of a stream has been read."""


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
    authority = Authority(root / "authority")
    shutil.copy(authority.certificate, root / "ca.crt")
    shutil.copy(authority.certificate, certs / "clients.crt")
    authority.issue("localhost", certs / "server")
    authority.issue("somebody", root / "client")
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


# --------------------------------------------------------------------------- the servers behind it


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
    grpc_port: int
    http_port: int


def serve_behind() -> Iterator[Behind]:
    servicer = Server()
    server = grpc.server(ThreadPoolExecutor(8))
    lockstep_pb2_grpc.add_LockstepServicer_to_server(servicer, server)
    states = health.HealthServicer()
    states.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), JsonHandler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield Behind(servicer, grpc_port, web.server_port)
    web.shutdown()
    server.stop(None)


# --------------------------------------------------------------------------- certificates


class Authority:
    """Signs certificates with openssl, as `deploy/tls/README.md` says it; its own is `ca.crt`."""

    def __init__(self, folder: Path) -> None:
        self.certificate = folder / "ca.crt"
        self._folder = folder
        folder.mkdir()
        _openssl(
            *("req", "-x509", *_KEY, "-subj", "/CN=test authority"),
            *("-keyout", folder / "ca.key", "-out", self.certificate),
        )

    def issue(self, name: str, stem: Path) -> tuple[Path, Path]:
        """(certificate, key) of a server at localhost, or of a client: two files of this stem."""
        certificate, key = stem.with_suffix(".crt"), stem.with_suffix(".key")
        request, names = self._folder / "request", self._folder / "names"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        _openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAcreateserial"),
            *("-CAkey", self._folder / "ca.key", "-out", certificate, "-extfile", names),
        )
        return certificate, key


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run([str(OPENSSL), *map(str, arguments)], check=True, capture_output=True)
