"""Proves: `aiperf profile` and a sweep of GuideLLM measure a served Lockstep without errors, and
their reports have how speculation went, as each answer says it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import NAME, WRAPPERS, Run, Served

pytestmark = [pytest.mark.ray, pytest.mark.clients]

REQUESTS = 16
LIMIT = 24
SWEEP = 3


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf_shows_throughput_and_speculation(
    served: Served, run: Run, tmp_path: Path, endpoint: str
) -> None:
    out = tmp_path / "aiperf"
    said = run(
        *("aiperf", "profile", "--model", NAME, "--url", served.http, "--streaming"),
        *("--endpoint-type", endpoint, "--tokenizer", served.directory),
        *("--concurrency", "4", "--request-count", str(REQUESTS), "--random-seed", "1"),
        *("--synthetic-input-tokens-mean", "24", "--output-tokens-mean", str(LIMIT)),
        *("--extra-inputs", "temperature:0", "--extra-inputs", "ignore_eos:true"),
        *("--use-server-token-count", "--ui", "none", "--output-artifact-dir", out),
    )
    report = json.loads((out / "profile_export_aiperf.json").read_text())
    figures = {
        name: figure["avg"]
        for name, figure in report.items()
        if isinstance(figure, dict) and "avg" in figure
    }
    assert report["error_summary"] == []
    assert figures["request_count"] == REQUESTS
    tokens = figures["total_usage_completion_tokens"]
    assert tokens == figures["total_osl"] == REQUESTS * LIMIT
    per_second = tokens / figures["benchmark_duration"]
    # It takes a slightly longer time for this figure.
    assert figures["output_token_throughput"] == pytest.approx(per_second, rel=0.1)

    assert "LLM Metrics: Spec Decode" in said
    accepted = figures["total_accepted_draft_tokens"]
    assert accepted == figures["total_usage_accepted_prediction_tokens"] > 0
    rejected = figures["total_draft_tokens"] - accepted
    assert rejected == figures["total_usage_rejected_prediction_tokens"]
    steps = figures["total_spec_decode_steps"]
    histogram = report["pooled_spec_decode_acceptance_histogram"]
    assert sum(histogram.values()) == steps
    mean = figures["spec_decode_token_weighted_acceptance_length"]
    assert mean == pytest.approx((steps + accepted) / steps)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_sweeps_and_shows_speculation(
    served: Served, run: Run, tmp_path: Path, path: str
) -> None:
    out = tmp_path / "report.json"
    backend = f"kind=openai_http,target={served.http},model={NAME},request_format={path}"
    run(
        *(WRAPPERS / "guidellm", "run", "--backend", backend),
        *("--profile", f"kind=sweep,sweep_size={SWEEP}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=24,output_tokens={LIMIT}"),
        *("--tokenizer", f"kind=hf_auto,model={served.directory}"),
        *("--disable-console-interactive", "--output", f"kind=json,path={out}"),
        offline=True,
    )
    benchmarks = json.loads(out.read_text())["benchmarks"]
    assert len(benchmarks) == SWEEP
    for benchmark in benchmarks:
        totals = benchmark["metrics"]["request_totals"]
        assert totals["errored"] == 0
        assert totals["successful"] >= REQUESTS
        for request in benchmark["requests"]["successful"]:
            told = request["response_metrics"]["speculative_decoding"]
            assert 0 <= told["num_accepted_draft_tokens"] <= told["num_draft_tokens"]
            assert told["num_spec_steps"] + told["num_accepted_draft_tokens"] == LIMIT
    assert told["num_draft_tokens"] > 0
