"""Asks a server through the `openai` package until its input ends, without any retry.

Run with the package's own environment: python openai_load.py BASE_URL IN_FLIGHT OUT ASKED, where
ASKED is the JSON of the parameters of each call, with a list as `prompt`. Each line of OUT is one
call as JSON: when it began and ended, what it gave, and which error it met.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai

BASE_URL, IN_FLIGHT, OUT, ASKED = sys.argv[1:]
OVER = threading.Event()


def ask(client: openai.OpenAI, number: int) -> dict[str, Any]:
    asked: Any = json.loads(ASKED)
    prompts = asked["prompt"]
    call: dict[str, Any] = {"prompt": number % len(prompts), "begun": time.time()}
    asked["prompt"] = prompts[call["prompt"]]
    try:
        if number % 2:
            call["text"] = client.completions.create(**asked).choices[0].text
        else:
            chunks = client.completions.create(**asked, stream=True)
            call["text"] = "".join(chunk.choices[0].text for chunk in chunks)
    except openai.APIStatusError as error:
        call |= {"status": error.status_code, "error": str(error)}
        call["retry_after"] = error.response.headers.get("retry-after")
    except Exception as error:
        call |= {"status": 0, "error": f"{type(error).__name__}: {error}"}
    return {**call, "ended": time.time()}


def work(first: int, out: Any, lock: threading.Lock) -> None:
    client = openai.OpenAI(base_url=BASE_URL, api_key="unused", max_retries=0, timeout=100)
    number = first
    while not OVER.is_set():
        call = ask(client, number)
        number += int(IN_FLIGHT) + 1
        with lock:
            out.write(json.dumps(call) + "\n")
            out.flush()
        if "error" in call:
            OVER.wait(0.2)


def main() -> None:
    lock = threading.Lock()
    with open(OUT, "w") as out, ThreadPoolExecutor(int(IN_FLIGHT)) as threads:
        for first in range(int(IN_FLIGHT)):
            threads.submit(work, first, out, lock)
        sys.stdin.read()
        OVER.set()


if __name__ == "__main__":
    main()
