"""Proves: `aiperf profile` measures a served Lockstep without errors, and its report has the
server's counts of tokens and, per step and in sum, how speculation went.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import NAME, Run, Served

pytestmark = [pytest.mark.ray, pytest.mark.clients]

REQUESTS = 16
LIMIT = 24


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
