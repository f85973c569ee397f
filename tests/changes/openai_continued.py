"""Asks through the `openai` package until every answer is whole, as docs/clients.md says.

python openai_continued.py BASE_URL THREADS, in the environment of that package. Each line of its
input is a call, `{"id": ..., "body": {...}, "cancel_after_s": ...}`: streams go through the
function of the page, others are asked again by the package itself. A line comes when a stream has
begun, and one when a call has ended. The end of the input ends this process.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai

BASE_URL, THREADS = sys.argv[1:]
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
ANSWER_S_MAX = 240.0
OWN = ("ignore_eos", "priority", "top_k", "return_token_ids")
"""What the package has no parameters for."""
TOLD: dict[str, Any] = {}
OUT = threading.Lock()


def say(line: dict[str, Any]) -> None:
    with OUT:
        print(json.dumps(line), flush=True)


def ask(client: openai.OpenAI, call: dict[str, Any]) -> None:
    body = dict(call["body"])
    asked = {"extra_body": {name: body.pop(name) for name in OWN if name in body}, **body}
    seen: dict[str, Any] = {"id": call["id"], "tokens": [], "text": "", "reason": "", "error": ""}
    seen["silence_s"] = 0.0
    try:
        if asked.pop("stream"):
            stream(client, asked, call, seen)
        else:
            take(client.completions.create(**asked).to_dict(), seen)
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    say({**seen, "ended": True})


def stream(client: openai.OpenAI, asked: Any, call: Any, seen: dict[str, Any]) -> None:
    begun_s, last_s = time.monotonic(), 0.0
    once = client.with_options(max_retries=0)
    chunks = TOLD["continued"](once.completions.with_streaming_response.create, **asked)
    for chunk in chunks:
        now_s = time.monotonic()
        if not last_s:
            say({"id": call["id"]})
        seen["silence_s"] = max(seen["silence_s"], now_s - (last_s or now_s))
        last_s = now_s
        take(chunk, seen)
        after_s = call.get("cancel_after_s")
        if after_s is not None and now_s - begun_s > after_s and not seen["reason"]:
            chunks.close()
            seen["cancelled"] = True
            return


def take(answer: dict[str, Any], seen: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        seen["tokens"] += choice.get("token_ids") or []
        seen["text"] += choice["text"]
        seen["reason"] = choice["finish_reason"] or seen["reason"]


def main() -> None:
    (source,) = re.findall(r"```python\n(.*?def continued.*?)```", PAGE.read_text(), re.DOTALL)
    exec(source, TOLD)
    client = openai.OpenAI(
        base_url=BASE_URL, api_key="unused", max_retries=100, timeout=ANSWER_S_MAX
    )
    with ThreadPoolExecutor(int(THREADS)) as threads:
        for line in sys.stdin:
            threads.submit(ask, client, json.loads(line))


if __name__ == "__main__":
    main()
