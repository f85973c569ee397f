"""Proves: /metrics and the dashboard tell what the server does, to those who may see it alone; a
browser may load and call nothing but the server for it.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.config_sources import from_args
from cluster.frontend.admission.keys import add
from cluster.frontend.http_api.app import http_app
from cluster.frontend.http_api.dashboard.api import CONTENT_TYPE
from tests.cluster.frontend.http_rig import http, post
from tests.cluster.frontend.rig import PROMPT, PROMPT_IDS, frontend
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


@pytest.mark.parametrize("path", ["/metrics", "/dashboard/data"])
async def test_only_operators_and_without_keys_this_machine_see_it(
    tmp_path: Path, path: str
) -> None:
    keys = tmp_path / "keys.yaml"
    common, operator = add(keys, "alice"), add(keys, "ops", operator=True)
    keyed = from_args({"auth": {"keys_file": str(keys)}})
    anyone = from_args({"auth": {"allow_anyone": True}})
    forwarded = {"x-forwarded-for": "10.0.0.9"}
    cases = [
        (keyed, "127.0.0.1", {}, 401),
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


async def test_the_page_shows_what_runs_and_no_text() -> None:
    async with frontend(step_s=0.02) as made:
        app = http_app(made.service)
        asked = asyncio.create_task(post(app, "completions", prompt=PROMPT, max_tokens=400))
        seen: dict[str, Any] = {}

        async def runs() -> bool:
            seen.update((await http(app, path="/dashboard/data")).json)
            return bool(seen["requests"] and len(seen["batches"]) > 2)

        while not await runs():
            await until(lambda: True)
        [replica], [request] = seen["replicas"], seen["requests"]
        assert request["replica_id"] == replica["id"]
        assert request["prompt_tokens"] == len(PROMPT_IDS)
        assert 0 < request["new_tokens"] <= request["new_tokens_max"] == 400
        newest, *_, oldest = seen["batches"]
        assert (oldest["kind"], newest["kind"]) == ("prefill", "speculate")
        assert newest["id"] > oldest["id"]
        assert (newest["rows"], newest["shortest"]) == (1, newest["longest"])
        assert seen["running"] == seen["serving"] == 1
        assert not {"prompt", "text", "tokens", "committed"} & set(request)
        asked.cancel()


async def test_its_files_may_load_nothing_from_elsewhere() -> None:
    async with frontend() as made:
        app = http_app(made.service)
        for path in ("/dashboard", "/dashboard/page.css", "/dashboard/page.js"):
            answer = await http(app, path=path)
            assert answer.status == 200
            policy = answer.headers["content-security-policy"]
            sources = [part.split()[1:] for part in policy.split("; ")]
            assert {word for part in sources for word in part} <= {"'none'", "'self'", "data:"}
            assert not re.search(r"https?://|url\(|@import", answer.body.decode())
