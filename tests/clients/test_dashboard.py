"""Proves: in a browser the dashboard answers a question, shows which tokens were drafted, batches,
and a replica that is killed and comes back; it loads nothing from another host, and a checker of
accessibility finds nothing in it, light or dark, on a narrow screen or a wide one.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.clients.conftest import Plain, Run, Served

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.clients,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]

QUESTION = "What does the for statement do?"


def test_a_visit_to_the_dashboard(served: Served, run: Run, plain: Plain) -> None:
    processes = re.findall(r"replica pid=(\d+)", served.log.read_text())
    script = Path(__file__).with_name("dashboard_visit.py")
    page = f"{served.http}/dashboard"
    said = json.loads(run("python", script, page, str(CHROMIUM), processes[-1]))

    prompt = plain.prompt([{"role": "user", "content": QUESTION}])
    expected = plain.text(prompt, 128)
    assert said["answer"].split() == expected.split()
    shown = said["tokens"]["own"] + said["tokens"]["drafted"]
    assert said["figures"].startswith(f"{shown} tokens in ")
    assert f"{said['tokens']['drafted']} of them were drafted" in said["figures"]
    assert said["tokens"]["own"] > 0 < said["batches"]

    assert set(said["hosts"]) == {served.http.removeprefix("http://")}
    assert said["complaints_before"] == []
    assert said["light"] == said["dark"] == []
