"""Proves: each alert rule names metrics that exist and leads to a heading of its own; it fires when
it should and not on a healthy server, whether Prometheus scrapes `/metrics` or Ray's nodes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.metrics import METRICS

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "lockstep.yaml"
RAYS_OWN = "serve_health_check_failures_total"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (of Prometheus) is not installed"
)


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def test_alerts_ask_for_metrics_that_exist_by_either_name() -> None:
    exported = {}
    for name, metric in METRICS.items():
        ends = {"Counter": ("_total",), "Histogram": ("_bucket", "_count", "_sum")}
        exported |= {f"{name}{end}": metric.tags for end in ends.get(metric.kind, ("",))}
    for rule in alerts():
        # All selectors: Ray's own metric, or ours by either name.
        asked = re.findall(r"(\w+)?\{(.*?)\}", rule["expr"])
        assert len(asked) == rule["expr"].count("lockstep"), rule["alert"]
        for own, matchers in asked:
            if own:
                assert own == f"ray_{RAYS_OWN}"
                continue
            (name,) = re.findall(r'__name__=~"\(ray_\)\?(\w+)"', matchers)
            assert name in exported, rule["alert"]
            assert set(re.findall(r"(\w+)=", matchers)) - {"__name__"} <= set(exported[name])
    from ray.serve._private import deployment_state

    assert f'"{RAYS_OWN}"' in Path(deployment_state.__file__).read_text()


def test_every_alert_leads_to_what_to_do() -> None:
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())
    for rule in alerts():
        page, anchor = rule["annotations"]["runbook"].split("#")
        assert anchor == rule["alert"].lower()
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert rule["alert"] in headings
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].endswith(".")


# --------------------------------------------------------------------------- when they fire

HEALTHY = {
    "lockstep_replicas": "2x120",
    "lockstep_waiting_requests": "3x120",
    "lockstep_kv_blocks": "100x120",
    "lockstep_kv_blocks_free": "50x120",
    "lockstep_sequences_preempted_total": "0x120",
    'lockstep_request_seconds_count{status="OK"}': "0+100x120",
    'lockstep_request_seconds_count{status="INTERNAL"}': "0x120",
    'lockstep_calls_refused_total{status="RESOURCE_EXHAUSTED"}': "0x120",
    "lockstep_audit_mismatches_total": "0x120",
}
"""By the metric's name: a value every 30 s."""

WRONG = {
    "LockstepNoReplica": {"lockstep_replicas": "0x120"},
    "LockstepPoolGone": dict.fromkeys(HEALTHY),
    "LockstepQueueGrows": {"lockstep_waiting_requests": "20+1x120"},
    "LockstepErrors": {'lockstep_request_seconds_count{status="INTERNAL"}': "0+2x120"},
    "LockstepRefuses": {'lockstep_calls_refused_total{status="RESOURCE_EXHAUSTED"}': "0+6x120"},
    "LockstepKvFull": {
        "lockstep_kv_blocks_free": "2x120",
        "lockstep_sequences_preempted_total": "0+3x120",
    },
    "LockstepRestarts": {f'{RAYS_OWN}{{application="lockstep",deployment="replica"}}': "0+1x120"},
    "LockstepAuditMismatch": {"lockstep_audit_mismatches_total": "0x40 1x79"},
}


def checked(tmp_path: Path, series: dict[str, str | None], firing: str | None) -> None:
    """After half an hour of these series the one alert fires, or none does."""
    tests = []
    for rule in alerts():
        said = {"exp_labels": rule["labels"], "exp_annotations": rule["annotations"]}
        tests.append(
            {
                "eval_time": "30m",
                "alertname": rule["alert"],
                "exp_alerts": [said] if rule["alert"] == firing else [],
            }
        )
    given = [{"series": name, "values": values} for name, values in series.items() if values]
    case = {"interval": "30s", "input_series": given, "alert_rule_test": tests}
    path = tmp_path / "case.yaml"
    content = {"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": [case]}
    path.write_text(yaml.safe_dump(content))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("prefix", ["", "ray_"])
@pytest.mark.parametrize("alert", [None, *WRONG])
def test_each_alert_fires_when_it_should_and_no_other(
    alert: str | None, prefix: str, tmp_path: Path
) -> None:
    assert WRONG.keys() == {rule["alert"] for rule in alerts()}
    series = HEALTHY | (WRONG[alert] if alert else {})
    # Serve's own metrics come from Ray's nodes only.
    expected = None if alert == "LockstepRestarts" and not prefix else alert
    checked(tmp_path, {prefix + name: values for name, values in series.items()}, expected)


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", RULES], check=True, capture_output=True)
