"""Proves: HTTP serves the callers of gRPC, refuses alike, and takes any body for what it is.

Requests are given to the ASGI application in the frontend's own event loop.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.config_sources import from_args
from cluster.frontend.admission.keys import add, hash_of
from cluster.frontend.json_codec import parsed_json
from tests.cluster.fakes import perfect
from tests.cluster.frontend.http_rig import http, http_frontend
from tests.cluster.frontend.rig import PROMPT, PROMPT_IDS

BODY = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()


def asking(**fields: Any) -> bytes:
    """A greedy request for the token ids."""
    plain = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "return_token_ids": True}
    return json.dumps(plain | fields).encode()


async def test_http_serves_and_refuses_as_grpc_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    key = add(keys, "alice", tokens_per_minute=100)
    counted: list[str] = []

    def sink(name: str, _value: float, tags: Mapping[str, str]) -> None:
        if name == "lockstep_calls_refused":
            counted.append(tags["status"])

    # Enough that the rate is not whole again for half a minute.
    body = asking(max_tokens=60)
    async with http_frontend(
        config=from_args({"auth": {"keys_file": str(keys)}}), sink=sink
    ) as app:
        headers = {"authorization": f"Bearer {key}"}
        good = await http(app, body, headers=headers, client="192.0.2.7", parts=5)
        assert good.status == 200
        assert good.json["choices"][0]["token_ids"] == perfect(PROMPT_IDS, 60)
        for wrong in (None, {"authorization": "Bearer x"}):
            refused = await http(app, body, headers=wrong)
            assert refused.status == 401
            assert refused.headers["www-authenticate"] == "Bearer"
        high = asking(priority="high")
        assert (await http(app, high, headers=headers)).status == 403
        over = await http(app, asking(max_tokens=300), headers=headers)
        assert over.status == 429
        assert int(over.headers["retry-after"]) >= 1
        for path in ("/healthz", "/readyz", "/health"):
            assert (await http(app, path=path, client="192.0.2.7")).status == 200
    refused_for = ["UNAUTHENTICATED", "UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"]
    assert counted == refused_for


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"[" * 200_000,
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
    BODY.decode().encode("utf-16"),
    b'{"nonsense\\ud800": 1}',
    b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "x", "max_tokens": 1e400}',
    b'{"model": "tiny", "prompt": "x", "max_tokens": ' + b"9" * 6000 + b"}",
    b'{"model": "tiny", "prompt": "x", "temperature": 1' + b"0" * 400 + b"}",
    b'{"model": "tiny", "prompt": "x", "stop_token_ids": [1' + b"0" * 400 + b"]}",
    b'{"model": "tiny", "prompt": "x", "seed": 1e300}',
    b'{"model": "tiny", "prompt": "x", "logit_bias": {"' + b"9" * 5000 + b'": 1}}',
    # On a thread there is more of a stack to parse it with than later to write it with.
    b'{"model": "tiny", "prompt": "x", "response_format": {"type": "json_schema", "json_schema": '
    b'{"schema": {"x": ' + b"[" * 970 + b"]" * 970 + b"}}}" + b" " * 20_000 + b"}",
    b'{"prompt": 5}',
    b"\xff\xfe\x00",
]


async def test_http_refuses_any_bad_body_as_such() -> None:
    async with http_frontend() as app:
        for body in BAD_BODIES:
            answer = await http(app, body, parts=3)
            assert answer.status == 400, body[:99]
            assert answer.error["status"] == "INVALID_ARGUMENT"
            assert len(answer.error["message"]) < 1100
        assert (await http(app, BODY)).status == 200


async def test_a_long_body_is_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def parsed(text: str) -> Any:
        threads.append(threading.current_thread())
        return parsed_json(text)

    monkeypatch.setattr("cluster.frontend.http_api.edge.parsed_json", parsed)
    async with http_frontend() as app:
        bodies = [
            asking(committed_token_ids=[5] * ids, max_tokens=1) for ids in (5, 20_000, 20_000)
        ]
        answers = await asyncio.gather(*(http(app, body) for body in bodies))
        assert [answer.status for answer in answers] == [400] * 3
    assert threads.count(threading.main_thread()) == 1
    assert len(threads) == 3
    assert len(set(threads)) == 2, "long bodies are parsed one after the other"


async def test_a_body_that_is_too_long_is_refused_as_such() -> None:
    config = from_args({"frontend": {"message_bytes_max": 1024}})
    async with http_frontend(config=config) as app:
        answer = await http(app, asking(user="a" * 2000))
        assert (answer.status, answer.error["param"]) == (413, "request")
        assert (await http(app, BODY)).status == 200


async def test_a_body_without_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.frontend.http_api.edge._BODY_S", 0.1)
    async with http_frontend() as app:
        assert (await http(app, b"{", ends=False)).status == 400
        assert (await http(app, b"{", ends=False, leaves=True)).status == 499


OURS = ["localhost:8000", "127.0.0.1", "[::1]:8000", "api.localhost:8000", "Ours.example.:8000"]
THEIRS = ["evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]
FOREIGN = ["http://localhost:3000", "http://evil.example", "null", "http://[x"]
FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(({"host": host}, 200) for host in OURS),
        *(({"host": host}, 421) for host in THEIRS),
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
        ({"host": "ours.example", "origin": "https://ours.example:443"}, 200),
        ({"host": "localhost:8000", "origin": "https://page.example"}, 200),
        *(({"host": "localhost:8000", "origin": origin}, 403) for origin in FOREIGN),
        ({"origin": "http://evil.example"}, 403),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        *(({"content-type": kind}, 415) for kind in ("text/plain", FORM, "")),
    ],
    ids=str,
)
async def test_a_web_page_cannot_use_the_server(headers: dict[str, str], status: int) -> None:
    server = {"http_hosts": ["ours.example"], "http_origins": ["https://page.example"]}
    async with http_frontend(config=from_args({"server": server})) as app:
        answer = await http(app, BODY, headers=headers)
        assert answer.status == status
        error = answer.json.get("error")
        named = {421: "host: ", 403: "origin: ", 415: "content-type: "}
        assert error is None if status == 200 else error["message"].startswith(named[status])
        shown = answer.headers.get("access-control-allow-origin")
        assert shown == (headers["origin"] if "page" in headers.get("origin", "") else None)
        listed = app.openapi()["paths"].items()
        paths = [(path, method.upper()) for path, methods in listed for method in methods]
        told = {"/healthz": 200, "/readyz": 200, "/health": 200, "/ping": 200}
        told["/v1/completions/"] = 404
        for path, method in [*paths, ("/v1/completions/", "POST")]:
            probe = await http(app, path=path, method=method, headers={"host": "pod-7.cluster"})
            expected = told.get(path, 421)
            assert (probe.status, probe.headers.get("location")) == (expected, None), path


async def test_the_document_describes_every_endpoint_that_takes_a_body() -> None:
    async with http_frontend(replicas=0) as app:
        listed = app.openapi()["paths"].items()
        described = (await http(app, path="/openapi.json")).json["paths"].items()
    routes, told = ({path for path, by in each if "post" in by} for each in (listed, described))
    # /invocations takes the bodies of both kinds of completions, and the other two none.
    assert told == routes - {"/invocations", "/ping", "/v1/responses/{name}/cancel"}


async def test_a_page_that_is_named_may_send_what_clients_send_and_read_the_answer() -> None:
    page = {"origin": "https://page.example"}
    server = {"http_origins": [page["origin"]]}
    async with http_frontend(config=from_args({"server": server})) as app:
        names = "authorization,content-type,last-event-id,x-request-id,x-stainless-lang"
        wanted = {"access-control-request-headers": names}
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
            asked = page | wanted | {"access-control-request-method": method}
            answer = await http(app, path=path, method="OPTIONS", headers=asked)
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == page["origin"]
            assert method in answer.headers["access-control-allow-methods"].split(", ")
            allowed = answer.headers["access-control-allow-headers"].lower()
            assert {name.strip() for name in allowed.split(",")} >= set(names.split(","))
        for body, status in ((BODY, 200), (b"{", 400)):
            answer = await http(app, body, headers=page)
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] == page["origin"]
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            assert set(exposed) >= {"x-request-id", "retry-after"}


async def test_the_one_key_opens_by_any_name_of_the_server_and_for_no_foreign_page() -> None:
    """And the model has the name that it is served by."""
    auth = {"api_key_sha256": hash_of("ours")}
    config = from_args({"auth": auth, "server": {"served_model_name": "name"}})
    async with http_frontend(config=config) as app:
        ours, theirs = (
            {"authorization": f"Bearer {key}", "host": "lockstep.example"}
            for key in ("ours", "theirs")
        )
        for headers, model, status in (
            (ours, "name", 200),
            (theirs, "name", 401),
            (ours, "tiny", 404),
            (ours | {"origin": "https://lockstep.example"}, "name", 200),
            (ours | {"origin": "https://evil.example"}, "name", 403),
        ):
            answer = await http(app, asking(model=model), headers=headers)
            assert answer.status == status
            assert not any(name.startswith("access-control-") for name in answer.headers)
        models = (await http(app, path="/v1/models", headers=ours)).json
        assert [model["id"] for model in models["data"]] == ["name"]
