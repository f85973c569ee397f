"""Asks a server until its input ends, without any retry: through the `openai` package where it is
installed, else by Python's own HTTP.

python openai_load.py BASE_URL IN_FLIGHT OUT ASKED, where
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
from urllib.error import HTTPError
from urllib.request import Request, urlopen

try:
    import openai
except ImportError:
    openai = None  # type: ignore[assignment]

BASE_URL, IN_FLIGHT, OUT, ASKED = sys.argv[1:]
OVER = threading.Event()


def ask(number: int) -> dict[str, Any]:
    asked: Any = json.loads(ASKED)
    prompts = asked["prompt"]
    call: dict[str, Any] = {"prompt": number % len(prompts), "begun": time.time()}
    asked["prompt"] = prompts[call["prompt"]]
    asked["stream"] = number % 2 == 0
    call |= by_http(asked) if openai is None else by_package(asked)
    return {**call, "ended": time.time()}


def by_package(asked: Any) -> dict[str, Any]:
    client = openai.OpenAI(base_url=BASE_URL, api_key="unused", max_retries=0, timeout=100)
    asked["extra_body"] = {"ignore_eos": asked.pop("ignore_eos")}
    try:
        answer: Any = client.completions.create(**asked)
        chunks = answer if asked["stream"] else [answer]
        return {"text": "".join(chunk.choices[0].text for chunk in chunks)}
    except openai.APIStatusError as error:
        after = error.response.headers.get("retry-after")
        return {"status": error.status_code, "error": str(error), "retry_after": after}
    except openai.APIError as error:
        # An event of an error, within a stream.
        told = error.body if isinstance(error.body, dict) else {}
        return {"status": told.get("status", "broken"), "error": str(error)}
    except Exception as error:
        return {"status": "broken", "error": f"{type(error).__name__}: {error}"}


def by_http(asked: Any) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    request = Request(f"{BASE_URL}/completions", json.dumps(asked).encode(), headers)
    try:
        with urlopen(request, timeout=100) as answer:
            if not asked["stream"]:
                return {"text": json.load(answer)["choices"][0]["text"]}
            text, ended = "", False
            for line in answer:
                ended |= line == b"data: [DONE]\n"
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if (error := event.get("error")) is not None:
                        return {"status": error["status"], "error": error["message"]}
                    text += event["choices"][0]["text"]
            return {"text": text} if ended else {"status": "broken", "error": "ended early"}
    except HTTPError as refused:
        after = refused.headers.get("retry-after")
        return {"status": refused.code, "error": refused.read().decode(), "retry_after": after}
    except Exception as error:
        return {"status": "broken", "error": f"{type(error).__name__}: {error}"}


def work(first: int, out: Any, lock: threading.Lock) -> None:
    number = first
    while not OVER.is_set():
        call = ask(number)
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
