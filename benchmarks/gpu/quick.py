"""What can be known of one card in at most nine minutes: `python -m benchmarks.gpu --quick`.

Each part is a process of its own with a bound of its own, and writes its JSON at once, so that a
cut loses only what is left:

    tests     the GPU tests of kernels and identity
    process   one process: a planted 8 B, batch 1, 8 and 32, k = 0 and 4, a draft model and a head,
              deterministic and not, with ceilings
    cluster   Ray and Serve: two replicas of the chat model that share the card, in closed loops of
              1, 16 and 64, beside one process that does the same work; every answer is compared
    killed    the same cluster under load; a replica is killed, and every answer is whole
    verify    `lockstep verify`: every token against transformers' `generate`

With `--device cpu` the same parts run on this machine with small shapes and five times the bounds:
so that on a card nothing but the card is new.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.shared.report import machine, table

BUDGET_S = 540.0
REHEARSAL = 5
"""Times the bounds on a CPU, which may be busy."""
PROMPTS = ("Why is the sky blue?", "Write a list of fruits.", "The for statement is", "Count to 9.")


@dataclass(frozen=True)
class Part:
    """A command, and how long it may take."""

    name: str
    command: Sequence[str]
    bound_s: float
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """What became of a part; its own figures are in NAME.json."""

    state: str
    """ok, failed, cut (it took too long) or left (no time)."""
    wall_s: float
    said: str
    """The end of what it printed."""


def parts_of(device: str, folder: Path) -> list[Part]:
    """In the order of what is most wanted."""
    on_gpu = device.startswith("cuda")
    target = "smollm2" if on_gpu else "tiny"
    python = sys.executable
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    dtype = ["--dtype", "bfloat16" if on_gpu else "float32"]
    same = ["--deterministic"] if on_gpu else []
    shape = ["--shape", "qwen3-8b", "--batches", "1", "8", "32", "--draft-lens", "4"]
    if not on_gpu:
        shape = ["--shape", "tiny", "--batches", "1", "8", "--draft-lens", "4"]
    loop = ["--in-flight", "1", "16", *(["64"] if on_gpu else [])]
    length = ["--new-tokens", "64" if on_gpu else "24"]
    memory = ["--memory", "8GiB" if on_gpu else "256MiB"]

    def part(name: str, bound_s: float, *command: str, **environment: str) -> Part:
        longest_s = bound_s if on_gpu else REHEARSAL * bound_s
        return Part(name, [python, "-m", *command], longest_s, environment)

    def figures(name: str) -> list[str]:
        return ["--json", str(folder / f"{name}.figures.json")]

    ours = ["--target", target, "--device", device, *dtype, *memory, *same]
    tests = ["tests/replicas/cuda", "tests/oracle/test_decoding.py"] if on_gpu else []
    tests = tests or ["tests/replicas/cuda/test_kernels.py"]
    return [
        part(
            "cluster",
            200.0,
            *("benchmarks.cluster", "--parts", "real", "--replicas", "2", "--draft", target),
            *("--requests-per-client", "2", *length, *loop, *ours),
            *figures("cluster"),
        ),
        part("killed", 120.0, "benchmarks.gpu.killed", *ours),
        part(
            "process",
            200.0,
            *("benchmarks.gpu", *shape, "--device", device, *dtype, "--rounds", "1"),
            *("--new-tokens", "48", "--prompt-tokens", "64", "--alone", "4"),
            *figures("process"),
        ),
        part(
            "verify",
            90.0,
            *("cluster.cli.main", "verify", "--prompts", str(prompts), "--target", target),
            *("--device", device, *dtype, "--max-new-tokens", "32", *same),
        ),
        part("tests", 150.0, "pytest", "-q", "-x", *tests, LOCKSTEP_TEST_DEVICE=device),
    ]


def run(part: Part, left_s: float) -> Outcome:
    begun_s = time.monotonic()
    bound_s = min(part.bound_s, left_s)
    if bound_s < 10:
        return Outcome("left", 0.0, "")
    process = subprocess.Popen(
        part.command,
        env=os.environ | part.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=bound_s)
        state = "ok" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        # With what it has started.
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        state = "cut"
    return Outcome(state, round(time.monotonic() - begun_s, 1), said[-4000:])


def quick(device: str, folder: Path, only: Sequence[str] = ()) -> int:
    """Runs all parts, or these; returns 1 if one has failed. `folder` gets their JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    budget_s = BUDGET_S if device.startswith("cuda") else REHEARSAL * BUDGET_S
    deadline_s = time.monotonic() + budget_s
    outcomes: dict[str, Outcome] = {}
    for part in parts_of(device, folder):
        if only and part.name not in only:
            continue
        outcome = outcomes[part.name] = run(part, deadline_s - time.monotonic())
        written = {"machine": machine(), "command": [*part.command], **asdict(outcome)}
        (folder / f"{part.name}.json").write_text(json.dumps(written, indent=2) + "\n")
        print(f"{part.name}: {outcome.state} after {outcome.wall_s} s", flush=True)
        if outcome.state != "ok":
            print(outcome.said, flush=True)
    print(table(("part", "state", "s"), [(n, o.state, o.wall_s) for n, o in outcomes.items()]))
    return int(any(outcome.state != "ok" for outcome in outcomes.values()))
