"""Proves: `lockstep chat` keeps the conversation over a stopped answer, and says what is
wrong.

Against a real gRPC server in this process, with lines of input from a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from grpc import StatusCode

from cluster.cli import chat as cli_chat
from cluster.cli.chat import HELP, chat
from cluster.client import Client, RetryPolicy
from cluster.client.channel import Server
from protos import lockstep_pb2 as pb
from tests.cluster.scripted import Running, run_server

TOKENS = [30, 40, 50, 60, 70, 80, 90]
INTERRUPT, END = KeyboardInterrupt(), EOFError()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    yield from run_server()


def talk(
    running: Running,
    lines: Sequence[str | BaseException],
    write: Callable[[str], None] | None = None,
    system: str | None = None,
) -> tuple[int, str, list[list[tuple[str, str]]]]:
    """The exit status, what was written, and the turns of each request."""
    running.server.script.tokens = running.server.script.tokens or TOKENS
    rest, written = list(lines), []

    def read(_prompt: str) -> str:
        line = rest.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    def note(text: str) -> None:
        written.append(text)
        if write is not None:
            write(text)

    code = chat(Server(running.address), system, {"max_new_tokens": 7}, read, note)
    asked = [
        [(turn.role, turn.content) for turn in request.messages]
        for request in running.server.script.asked
    ]
    return code, "".join(written), asked


@pytest.fixture(autouse=True)
def _fresh(running: Running) -> None:
    running.server.script = type(running.server.script)()


def answer(running: Running) -> str:
    _, written, _ = talk(running, ["hello", END])
    running.server.script.asked.clear()
    return written.split(f"{HELP}\n", 1)[1].rsplit("\n\n", 1)[0]


def test_each_question_comes_with_all_turns_since_the_last_reset(running: Running) -> None:
    text = answer(running)
    assert text
    lines = ["hello", "", "more", "/reset", "again", "/exit"]
    code, written, asked = talk(running, lines, system="be brief")
    first = [("system", "be brief"), ("user", "hello")]
    again = [("system", "be brief"), ("user", "again")]
    assert asked == [first, [*first, ("assistant", text), ("user", "more")], again]
    assert (code, written.count(text)) == (0, 3)


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(running: Running) -> None:
    text = answer(running)
    stopped = []

    def stop_once(written: str) -> None:
        if written and text.startswith(written) and not stopped:
            stopped.append(written)
            raise KeyboardInterrupt

    lines = ["hello", "more", "/reset", "/stats", END]
    code, written, asked = talk(running, lines, stop_once)
    assert asked[1] == [("user", "hello"), ("assistant", stopped[0]), ("user", "more")]
    assert len(stopped[0]) < len(text)
    assert (code, "[stopped]" in written, "last answer" in written) == (0, True, False)


def test_what_goes_wrong_is_told_and_leaves_the_conversation_as_it_is(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt at the prompt and of the figures, an unknown command, a refused question.
    Before the first answer there are the server's figures alone."""
    text = answer(running)
    running.server.script.cuts = [None, (0, StatusCode.INVALID_ARGUMENT, "messages: too long")]
    statuses = [pb.StatusResponse(), pb.StatusResponse(), INTERRUPT]

    def status(_client: Client) -> object:
        if isinstance(said := statuses.pop(0), BaseException):
            raise said
        return said

    monkeypatch.setattr(Client, "status", status)
    lines = [INTERRUPT, "/stats", "hello", "/what", "/stats", "\udcff", "too long", "more", END]
    code, written, asked = talk(running, lines)
    assert (code, written.count(HELP)) == (0, 4)
    assert (written.count("server: "), written.count("last answer: 7 tokens")) == (1, 1)
    assert written.index("UTF-8") < written.index("INVALID_ARGUMENT: messages: too long")
    assert asked[2] == [("user", "hello"), ("assistant", text), ("user", "more")]


def test_a_server_that_has_stopped_is_given_up_and_one_that_never_was_is_told_how_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli_chat, "PATIENCE", RetryPolicy(give_up_s=0.5))
    server = run_server()
    running = next(server)

    def stop(_written: str) -> None:
        next(server, None)

    sentence = f"No server answers at {running.address}; `lockstep serve` starts one."
    code, written, _ = talk(running, ["hello", END], stop)
    assert (code, written.count(sentence)) == (0, 1)
    assert talk(running, [])[:2] == (1, f"{sentence}\n")
