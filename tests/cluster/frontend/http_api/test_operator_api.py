"""Proves: /metrics tells what the server has counted, to those who may see it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.config_sources import from_args
from cluster.frontend.admission.keys import add
from cluster.frontend.http_api.app import http_app
from cluster.frontend.http_api.operator_api import CONTENT_TYPE
from tests.cluster.frontend.http_rig import http, post
from tests.cluster.frontend.rig import frontend
from tests.cluster.wire import until


async def totals(app: Any) -> dict[str, float]:
    """Values of the page by the names of samples, over all labels."""
    answer = await http(app, path="/metrics")
    assert (answer.status, answer.headers["content-type"]) == (200, CONTENT_TYPE)
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def test_the_page_counts_what_was_answered() -> None:
    config = from_args({"pool": {"lease_s": 1.0}, "frontend": {"coalesce_ms": 1}})
    async with frontend(config=config) as made:
        app = http_app(made.service)
        for _ in range(3):
            await post(app, "completions", prompt="x", max_tokens=8, stream=True)
        await post(app, "completions", prompt="x", max_tokens=-1)
        found: dict[str, float] = {}

        async def told() -> bool:
            found.update(await totals(app))
            return found["lockstep_first_token_seconds_count"] == 3

        while not await told():
            await until(lambda: True)
        assert found["vllm:generation_tokens_total"] == 24
        assert found["vllm:request_success_total"] == 3
        assert found["vllm:e2e_request_latency_seconds_count"] == 3
        assert found["vllm:request_generation_tokens_sum"] == 24
        assert found["lockstep_calls_refused_total"] == 1
        assert found["lockstep_replicas"] == 1


@pytest.mark.parametrize("path", ["/metrics"])
async def test_only_this_machine_and_operators_see_it(tmp_path: Path, path: str) -> None:
    keys = tmp_path / "keys.yaml"
    common, operator = add(keys, "alice"), add(keys, "ops", operator=True)
    keyed = from_args({"auth": {"keys_file": str(keys)}})
    anyone = from_args({"auth": {"allow_anyone": True}})
    forwarded = {"x-forwarded-for": "10.0.0.9"}
    cases = [
        (keyed, "127.0.0.1", {}, 200),
        (keyed, "127.0.0.1", forwarded, 401),
        (keyed, "10.0.0.9", {}, 401),
        (keyed, "10.0.0.9", {"authorization": f"Bearer {common}"}, 403),
        (keyed, "10.0.0.9", {"authorization": f"Bearer {operator}"}, 200),
        (anyone, "127.0.0.1", {}, 200),
        (anyone, "127.0.0.1", forwarded, 403),
        (anyone, "10.0.0.9", {}, 403),
        (anyone, None, {}, 403),
    ]
    for config, client, headers, status in cases:
        async with frontend(config=config) as made:
            answer = await http(http_app(made.service), path=path, headers=headers, client=client)
            assert answer.status == status, (client, headers)
