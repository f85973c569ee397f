"""What `lockstep demo` does: a whole cluster, many streams at once, and the proof beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.client import AsyncClient
from cluster.config import ClusterConfig
from protos import lockstep_pb2 as pb
from scheduler.messages import Request

PROMPTS = (
    "The for statement is used to iterate over",
    "A class definition is an executable statement. The",
    "The try statement specifies exception handlers",
    "Return a new list containing",
    "When a generator function is called, it returns",
    "The import statement combines two operations;",
    "Dictionaries can be created by",
    "If the file does not exist,",
)
_READY_S = 180.0
_SHOWN_LINES = 3


@dataclass
class _Answer:
    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    end: pb.End | None = None


def run_demo(config: ClusterConfig, max_new_tokens: int) -> int:
    """Returns the exit status: 0 when every output equals plain decoding."""
    from cluster import app, serve_app

    console = Console(highlight=False)
    console.print(
        f"Starting Ray, Serve, the pool and {config.replicas} replicas of "
        f"{config.replica.target} ...",
        style="dim",
    )
    started_s = time.perf_counter()
    cluster = app.ClusterRun(config)
    try:
        cluster.start(quiet=True)
        console.print(f"Ready after {time.perf_counter() - started_s:.1f} s.\n", style="dim")
        address = f"localhost:{config.server.grpc_port}"
        answers, total_s, status = asyncio.run(_ask(address, max_new_tokens, console))
    except serve_app.StartFailed as error:
        console.print(f"Lockstep did not start: {error}", markup=False, soft_wrap=True)
        return 1
    finally:
        cluster.stop()
    console.print("Stopped. Decoding the same prompts plainly ...", style="dim")
    equal = sum(
        expected == answer.tokens
        for expected, answer in zip(_plain(config, max_new_tokens), answers, strict=True)
    )
    console.print(_figures(answers, total_s, status, equal))
    return 0 if equal == len(answers) else 1


async def _ask(
    address: str, max_new_tokens: int, console: Console
) -> tuple[list[_Answer], float, pb.StatusResponse]:
    answers = [_Answer(prompt) for prompt in PROMPTS]
    async with AsyncClient(address) as client:
        await client.wait_until_ready(_READY_S)
        started_s = time.perf_counter()
        streams = [_stream(client, answer, max_new_tokens) for answer in answers]
        if console.is_terminal:
            with Live(
                console=console, refresh_per_second=12, get_renderable=lambda: _show(answers)
            ):
                await asyncio.gather(*streams)
        else:
            await asyncio.gather(*(_then_print(stream, console) for stream in streams))
        return answers, time.perf_counter() - started_s, await client.status()


async def _stream(client: AsyncClient, answer: _Answer, max_new_tokens: int) -> _Answer:
    request = pb.GenerateRequest(prompt=answer.prompt, max_new_tokens=max_new_tokens)
    async for chunk in client.stream(request):
        answer.text += chunk.text
        answer.tokens.extend(chunk.token_ids)
        if chunk.HasField("end"):
            answer.end = chunk.end
    return answer


async def _then_print(stream: Coroutine[Any, Any, _Answer], console: Console) -> None:
    answer = await stream
    console.print(Text.assemble((answer.prompt, "bold"), answer.text), soft_wrap=True)
    console.print()


def _show(answers: Sequence[_Answer]) -> Group:
    """Each answer's last lines, so that all of them fit on a screen."""
    panels = []
    for answer in answers:
        text = Text.assemble((answer.prompt, "bold"), " ".join(answer.text.split("\n")))
        width = Console().width - 4
        lines = text.wrap(Console(), width)
        shown = Text("\n").join(list(lines)[-_SHOWN_LINES:])
        panels.append(Panel(shown, border_style="green" if answer.end else "dim"))
    return Group(*panels)


def _plain(config: ClusterConfig, max_new_tokens: int) -> list[list[int]]:
    import torch
    from transformers.utils import logging as transformers_logging

    from cluster.frontend.target_text import TargetText
    from cluster.verify import transformers_greedy

    transformers_logging.disable_progress_bar()
    # One row of a small model: more threads only wait for each other.
    torch.set_num_threads(1)
    text = TargetText.load(config.replica)
    requests = [
        Request(str(index), text.encode(prompt), max_new_tokens)
        for index, prompt in enumerate(PROMPTS)
    ]
    return list(transformers_greedy(config.replica, requests, text.eos_token_ids))


def _figures(
    answers: Sequence[_Answer], total_s: float, status: pb.StatusResponse, equal: int
) -> Table:
    tokens = sum(len(answer.tokens) for answer in answers)
    per_row = status.tokens_committed / status.row_steps if status.row_steps else 0.0
    table = Table(show_header=False, box=None, padding=(0, 2))
    rows = {
        "tokens/s": f"{tokens / total_s:.0f} ({tokens} tokens in {total_s:.2f} s, streamed)",
        "acceptance": f"{status.acceptance:.1%} of draft tokens",
        "tokens per row and step": f"{per_row:.2f}",
        "mean group spread": f"{status.group_spread_mean:.1f} tokens",
        "equal to plain decoding": f"{equal} of {len(answers)} outputs",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
