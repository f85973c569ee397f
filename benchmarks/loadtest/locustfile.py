"""The load over OpenAI's API, as Locust runs it: users come and go with the profile, and each asks
once a second for a stream. `python -m benchmarks.loadtest` starts it in Locust's own environment.

Each call is a line of JSON in the file that LOADTEST_OUT names.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from load_profile import LOAD_S, NEW_TOKENS, PROMPT, share_at  # type: ignore[import-not-found]
from locust import HttpUser, LoadTestShape, constant_throughput, task  # type: ignore[import-not-found]

PEAK = float(os.environ["LOADTEST_PEAK"])
MODEL = os.environ["LOADTEST_MODEL"]
START_S = float(os.environ["LOADTEST_START"])
"""When the profile begins, by the machine's clock."""
OUT = open(os.environ["LOADTEST_OUT"], "w")  # noqa: SIM115  (as long as the process)


class Shape(LoadTestShape):  # type: ignore[misc]
    def tick(self) -> tuple[int, float] | None:
        now_s = time.time() - START_S
        if now_s > LOAD_S:
            return None
        return round(PEAK * share_at(now_s)), 100.0


class User(HttpUser):  # type: ignore[misc]
    wait_time = constant_throughput(1)

    @task  # type: ignore[untyped-decorator]
    def ask(self) -> None:
        asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": NEW_TOKENS, "stream": True}
        asked |= {"temperature": 0, "ignore_eos": True}
        begun_s, first_s, tokens, ended, error = time.time(), 0.0, 0, False, ""
        with self.client.post(
            "/v1/completions", json=asked, stream=True, catch_response=True, timeout=120
        ) as response:
            try:
                response.raise_for_status()
                for line in response.iter_lines():
                    if line == b"data: [DONE]":
                        ended = True
                    elif line.startswith(b"data: "):
                        first_s = first_s or time.time()
                        event = json.loads(line[6:])
                        error = error or str(event.get("error", ""))
                        tokens += sum(bool(one["text"]) for one in event.get("choices", ()))
            except Exception as raised:  # whatever requests raises
                error = f"{type(raised).__name__}: {raised}"
            if error or not ended:
                response.failure(error or "the stream ended early")
        call = {"at": begun_s - START_S, "first": first_s - begun_s, "total": time.time() - begun_s}
        OUT.write(json.dumps({**call, "error": error or ("" if ended else "ended early")}) + "\n")
        OUT.flush()
