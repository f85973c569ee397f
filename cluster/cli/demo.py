"""What `lockstep demo` does: a whole cluster, eight answers at once, and the proof beside them.

With the chat model each question is a conversation of one turn; the tiny pair, which knows no
conversation, goes on with a text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import grpc
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.cli.client_flags import failure
from cluster.cli.serve import Terminal
from cluster.client import AsyncClient
from cluster.client.channel import Server
from cluster.config import ClusterConfig
from cluster.frontend.prompts import ChatPrompt
from protos import lockstep_pb2 as pb
from replicas.names import TINY
from scheduler.messages import Request

if TYPE_CHECKING:
    from cluster.frontend.bounded_work import BoundedWork
    from cluster.frontend.target_text import TargetText

QUESTIONS = (
    "Why is the sky blue?",
    "Give me three tips for a good night's sleep.",
    "Explain what a database index is to a beginner.",
    "Write a short poem about the sea.",
    "What should I cook with rice, eggs and spinach?",
    "How do I politely say no to an invitation?",
    "Write a Python function that reverses a string.",
    "Which planets of the solar system have rings?",
)
TEXTS = (
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
_COLUMN = 38
"""Least width of an answer on the screen, in characters."""


@dataclass
class Answer:
    """What one request has received so far."""

    question: str
    chat: bool
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    complete: bool = False

    def request(self, max_new_tokens: int) -> pb.GenerateRequest:
        if not self.chat:
            return pb.GenerateRequest(prompt=self.question, max_new_tokens=max_new_tokens)
        turn = pb.ChatMessage(role="user", content=self.question)
        return pb.GenerateRequest(messages=[turn], max_new_tokens=max_new_tokens)


def run_demo(config: ClusterConfig, max_new_tokens: int, verbose: bool = False) -> int:
    """Returns the exit status: 0 when every output equals that of the target alone."""
    terminal = Terminal(verbose, stderr=False)
    from cluster import run

    started_s = time.perf_counter()
    cluster = run.ClusterRun(config)
    chat = config.replica.target != TINY
    answers = [Answer(question, chat) for question in (QUESTIONS if chat else TEXTS)]
    address = f"localhost:{config.server.grpc_port}"
    try:
        terminal.say_start()
        cluster.deploy(tell=terminal.tell)
        terminal.say(f"Replicas of {config.replica.target} start: {config.replicas} ...")
        cluster.wait_until(lambda all_up: all_up)
        terminal.say(f"Ready after {time.perf_counter() - started_s:.1f} s.\n")
        total_s, status = asyncio.run(_ask(address, answers, max_new_tokens, terminal.console))
    except run.StartFailed as error:
        terminal.say(f"Lockstep did not start: {error}")
        return 1
    except grpc.RpcError as error:
        terminal.say(failure(Server(address), error))
        return 1
    except KeyboardInterrupt:
        terminal.say("Stopping.")
        return 130
    finally:
        cluster.stop()
    terminal.say("Stopped. transformers' generate decodes the same ...")
    equal, ties = _compare(config, answers, max_new_tokens)
    terminal.console.print(_figures(answers, total_s, status, equal, ties))
    return 0 if equal + ties == len(answers) else 1


async def _ask(
    address: str, answers: Sequence[Answer], max_new_tokens: int, console: Console
) -> tuple[float, pb.StatusResponse]:
    async with AsyncClient(address) as client:
        await client.wait_until_ready(_READY_S)
        started_s = time.perf_counter()
        streams = [_stream(client, each, max_new_tokens, console) for each in answers]
        if console.is_terminal:
            with Live(
                console=console,
                refresh_per_second=12,
                get_renderable=lambda: show(answers, *console.size),
            ):
                await asyncio.gather(*streams)
        else:
            await asyncio.gather(*streams)
        return time.perf_counter() - started_s, await client.status()


async def _stream(
    client: AsyncClient, answer: Answer, max_new_tokens: int, console: Console
) -> None:
    """Where there is no terminal, print the answer when it is complete."""
    async for chunk in client.stream(answer.request(max_new_tokens)):
        answer.text += chunk.text
        answer.tokens.extend(chunk.token_ids)
    answer.complete = True
    if not console.is_terminal:
        between = "\n" if answer.chat else ""
        text = Text.assemble((answer.question, "bold"), between, answer.text)
        console.print(text, soft_wrap=True)
        console.print()


def show(answers: Sequence[Answer], width: int, height: int) -> Table:
    """The answers side by side: the last lines of each, so that all fit on the screen."""
    columns = min(max(1, width // _COLUMN), len(answers))
    rows = -(-len(answers) // columns)
    lines = max(1, (height - 1) // rows - 2)
    inner = width // columns - 4
    table = Table.grid()
    for _ in range(columns):
        table.add_column(width=width // columns)
    panels = [_panel(answer, inner, lines) for answer in answers]
    for first in range(0, len(panels), columns):
        table.add_row(*panels[first : first + columns])
    return table


def _panel(answer: Answer, width: int, lines: int) -> Panel:
    wrapped = Text(" ".join(answer.text.split())).wrap(Console(width=width), width)
    shown = Text("\n").join(list(wrapped)[-lines:])
    title = Text(answer.question, "bold", overflow="ellipsis", no_wrap=True)
    border = "green" if answer.complete else "dim"
    return Panel(shown, title=title, title_align="left", border_style=border, height=lines + 2)


def _compare(
    config: ClusterConfig, answers: Sequence[Answer], max_new_tokens: int
) -> tuple[int, int]:
    """How many answers equal greedy decoding by transformers at batch 1, and how many more part
    from it at a tie below the noise of float32."""
    import torch
    from transformers.utils import logging as transformers_logging

    from cluster.frontend.bounded_work import BoundedWork
    from cluster.frontend.target_text import TargetText
    from cluster.verify import differences, just_enough, transformers_greedy

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    text = TargetText.load(config.replica)
    bounded = BoundedWork(text, config.frontend)
    chat = answers[0].chat
    if not chat:
        # One row of a tiny model: more threads only wait for each other.
        torch.set_num_threads(1)
    requests = [
        Request(str(index), _prompt(text, bounded, answer), max_new_tokens)
        for index, answer in enumerate(answers)
    ]
    ends = text.end_of_turn_ids if chat else text.eos_token_ids

    @cache
    def own() -> Any:
        from replicas.parallel import load_replica

        return load_replica(just_enough(config.planned_replica, config.scheduler, text, requests))

    expected = transformers_greedy(config.replica, requests, ends)
    outputs = [answer.tokens for answer in answers]
    found = differences(expected, outputs, requests, config.replica, own)
    return len(answers) - len(found), sum(each.tie for each in found)


def _prompt(text: TargetText, bounded: BoundedWork, answer: Answer) -> tuple[int, ...]:
    if answer.chat:
        asked = ChatPrompt([{"role": "user", "content": answer.question}])
        return text.encode_rendered(bounded.rendered_now(asked))
    return text.encode(answer.question)


def _figures(
    answers: Sequence[Answer], total_s: float, status: pb.StatusResponse, equal: int, ties: int
) -> Table:
    tokens = sum(len(answer.tokens) for answer in answers)
    per_row = status.tokens_committed / status.row_steps if status.row_steps else 0.0
    table = Table(show_header=False, box=None, padding=(0, 2))
    tied = f", {ties} part at a tie below the noise of float32" if ties else ""
    rows = {
        "tokens/s": f"{tokens / total_s:.0f} ({tokens} tokens in {total_s:.2f} s, streamed)",
        "tokens per row and step": f"{per_row:.2f}",
        "acceptance": f"{status.acceptance:.1%} of {status.draft_tokens} draft tokens",
        "equal to transformers' generate": f"{equal} of {len(answers)} outputs{tied}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
