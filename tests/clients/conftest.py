"""A served model, the text that transformers writes with it, and clients as their users run them.

The target is the tiny one with a chat template that knows tools. The clients are installed apart,
by `make test-clients`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from replicas.demo import TARGET_DIR
from tests.cluster.frontend.http_rig import HERMES_TEMPLATE
from tests.free_ports import free_port
from tests.serving import lockstep_serve

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin"
WRAPPERS = ROOT / ".venv-wrappers" / "bin"
NAME = "tiny-chat"
CLIENT_S = 400.0


@dataclass(frozen=True)
class Served:
    """A server with the model NAME."""

    directory: Path
    """Of the target, for a client that tokenizes by itself."""
    http: str
    grpc: str
    log: Path


Run = Callable[..., str]


DRAFTER = json.dumps({"method": "draft_model", "model": "tiny"})


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    target = folder / "target"
    shutil.copytree(TARGET_DIR, target)
    (target / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    ports = free_port(), free_port()
    arguments = [
        *(
            str(target),
            "--speculative-config",
            DRAFTER,
            "--served-model-name",
            NAME,
            "--device",
            "cpu",
        ),
        *("--verbose", "--http-port", str(ports[0]), "--grpc-port", str(ports[1])),
    ]
    with lockstep_serve(arguments, folder / "serve.log"):
        yield Served(
            target, f"http://127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", folder / "serve.log"
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a client to its end and gives what it prints, which `pytest -rP` shows, too."""
    # AIPerf takes no local tokenizer when it is told to be offline.
    ours = ("PYTHONPATH", "HF_HUB_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "COLUMNS": "120"}
    # litellm would ask its own site for the prices of models.
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

    def run(
        name: str | Path, *arguments: str | Path, offline: bool = False, given: str = ""
    ) -> str:
        """`name`: of a client of `all.txt`, or a path."""
        found = shutil.which(name, path=f"{CLIENTS}:{os.environ['PATH']}")
        assert found is not None, f"{name} is not installed: make test-clients"
        done = subprocess.run(
            [found, *map(str, arguments)],
            env=environment | ({"HF_HUB_OFFLINE": "1"} if offline else {}),
            cwd=tmp_path,
            input=given,
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
        )
        print(done.stdout)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return run


class Plain:
    """The target by transformers alone."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(directory)

    def prompt(self, messages: list[dict[str, str]]) -> str:
        made: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return made

    def tokens(self, prompt: str, count: int) -> tuple[list[int], list[int]]:
        """Those of the prompt, and at most `count` new ones, by greedy decoding."""
        ids = self._tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        whole = self._model.generate(**ids, max_new_tokens=count, do_sample=False)[0].tolist()
        length = ids["input_ids"].shape[1]
        return whole[:length], whole[length:]

    def text(self, prompt: str, count: int) -> str:
        said: str = self._tokenizer.decode(self.tokens(prompt, count)[1], skip_special_tokens=True)
        return said

    def logprobs(self, ids: list[int]) -> torch.Tensor:  # [tokens, vocab]
        """Of the token behind each."""
        with torch.no_grad():
            return self._model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.fixture(scope="session")
def plain(served: Served) -> Plain:
    return Plain(served.directory)
