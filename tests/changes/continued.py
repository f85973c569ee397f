"""Runs the function of docs/clients.md that continues broken streams, as it stands there.

python continued.py BASE_URL STREAMS ASKED, in the environment of the `openai` package. Prints a
line when all streams have brought something, and then what each has brought as one JSON list.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai

BASE_URL, STREAMS, ASKED = sys.argv[1:]
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BEGUN = threading.Barrier(int(STREAMS), action=lambda: print("all have begun", flush=True))


def main() -> None:
    (source,) = re.findall(r"```python\n(.*?def continued.*?)```", PAGE.read_text(), re.DOTALL)
    told: dict[str, Any] = {}
    exec(source, told)
    client = openai.OpenAI(base_url=BASE_URL, api_key="unused", max_retries=0, timeout=100)

    def stream(number: int) -> str:
        asked = json.loads(ASKED)
        prompts = asked.pop("prompt")
        text, begun = "", False
        create = client.completions.with_streaming_response.create
        extra = {"extra_body": {"ignore_eos": asked.pop("ignore_eos")}}
        for chunk in told["continued"](
            create, prompt=prompts[number % len(prompts)], **asked, **extra
        ):
            text += chunk["choices"][0]["text"]
            if not begun:
                begun = True
                BEGUN.wait()
        return text

    with ThreadPoolExecutor(int(STREAMS)) as threads:
        print(json.dumps(list(threads.map(stream, range(int(STREAMS))))))


if __name__ == "__main__":
    main()
