"""Proves: curl reads a stream of server-sent events, and grpcurl finds the service by reflection
and calls it: both get the text of transformers' `generate`.
"""

from __future__ import annotations

import json

import pytest

from tests.clients.conftest import NAME, Plain, Run, Served

pytestmark = [pytest.mark.ray, pytest.mark.clients]

PROMPT = "The while statement"
LIMIT = 24


def test_curl_reads_server_sent_events(served: Served, run: Run, plain: Plain) -> None:
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": LIMIT, "temperature": 0, "stream": True}
    said = run(
        *("curl", "--silent", "--show-error", "--fail", "--no-buffer"),
        *(f"{served.http}/v1/completions", "--header", "content-type: application/json"),
        *("--data", json.dumps(asked)),
    )
    *events, end, empty = said.split("\n\n")
    assert (end.removeprefix("data: "), empty) == ("[DONE]", "")
    data = [line for event in events for line in event.split("\n") if line.startswith("data: ")]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in data]
    assert len(choices) > 1
    assert "".join(choice["text"] for choice in choices) == plain.text(PROMPT, LIMIT)
    assert choices[-1]["finish_reason"] == "length"


def test_grpcurl_finds_the_service_and_calls_it(served: Served, run: Run, plain: Plain) -> None:
    assert "lockstep.v1.Lockstep" in run("grpcurl", "-plaintext", served.grpc, "list").split()
    told = run("grpcurl", "-plaintext", served.grpc, "describe", "lockstep.v1.Lockstep")
    assert "rpc GenerateStream" in told
    health = run("grpcurl", "-plaintext", served.grpc, "grpc.health.v1.Health/Check")
    assert json.loads(health) == {"status": "SERVING"}
    asked = json.dumps({"prompt": PROMPT, "max_new_tokens": LIMIT})
    for method in ("Generate", "GenerateStream"):
        said = run(
            *("grpcurl", "-plaintext", "-d", asked, served.grpc, f"lockstep.v1.Lockstep/{method}")
        )
        # grpcurl prints a JSON object for each message.
        messages = json.loads("[" + said.replace("\n}\n{", "\n},\n{") + "]")
        assert "".join(message.get("text", "") for message in messages) == plain.text(PROMPT, LIMIT)
        assert messages[-1]["end"]["finish_reason"] == "FINISH_REASON_LENGTH"
