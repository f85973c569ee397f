"""What `lockstep chat` does: a conversation with a running server, in a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import grpc

from cluster.cli.client_flags import failure
from cluster.cli.generate import figures
from cluster.client import Client, RetryPolicy
from cluster.client.channel import Server
from protos import lockstep_pb2 as pb

PATIENCE = RetryPolicy(give_up_s=5.0)
"""A short wait, for nothing is said of it: the user can ask again."""
HELP = "Ctrl-C stops an answer; /reset begins anew, /stats shows figures, /exit ends."


def chat(
    server: Server,
    system: str | None,
    options: dict[str, Any],
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
) -> int:
    """Talk until /exit or the end of input. Returns the exit status, 1 where no server answers.

    `system` is the system's turn, `options` are further fields of each request.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() edits lines with it)
    with Client(server.address, server.api_key, server.tls, PATIENCE) as client:
        try:
            status = client.status()
        except grpc.RpcError as error:
            write(f"{failure(server, error)}\n")
            return 1
        targets = ", ".join(dict.fromkeys(replica.target for replica in status.replicas))
        write(f"{targets or 'No replica is ready yet'}.\n{HELP}\n")
        Conversation(client, server, system, options, write).run(read)
    return 0


class Conversation:
    """The turns so far, and what a line of input does to them."""

    def __init__(
        self,
        client: Client,
        server: Server,
        system: str | None,
        options: dict[str, Any],
        write: Callable[[str], None],
    ) -> None:
        self._client = client
        self._server = server
        self._first = [pb.ChatMessage(role="system", content=system)] if system else []
        self._options = options
        self._write = write
        self._figures = ""
        """Of the last answer; empty where it did not come to its end."""
        self.turns = list(self._first)

    def run(self, read: Callable[[str], str]) -> None:
        """Until /exit or the end of input."""
        goes_on = True
        while goes_on:
            try:
                goes_on = self._take(read("> ").strip())
            except EOFError:
                self._write("\n")
                return
            except KeyboardInterrupt:
                self._write(f"\n{HELP}\n")

    def _take(self, line: str) -> bool:
        """Whether the conversation goes on."""
        match line:
            case "":
                pass
            case "/exit":
                return False
            case "/reset":
                self.turns, self._figures = list(self._first), ""
                self._write("The conversation is forgotten.\n")
            case "/stats":
                self._stats()
            case _ if line.startswith("/"):
                self._write(f"{HELP}\n")
            case _:
                self._ask(line)
        return True

    def _ask(self, question: str) -> None:
        """Stream the answer. What came of it is kept; a question without any is forgotten."""
        try:
            asked = [*self.turns, pb.ChatMessage(role="user", content=question)]
        except UnicodeEncodeError:
            self._write("The question is not UTF-8.\n")
            return
        request = pb.GenerateRequest(messages=asked, **self._options)
        answer = self._figures = ""
        begun_s = time.perf_counter()
        stream = self._client.stream(request)
        try:
            for chunk in stream:
                answer += chunk.text
                self._write(chunk.text)
                if chunk.HasField("end"):
                    seconds = time.perf_counter() - begun_s
                    self._figures = figures(chunk.end, seconds, chunk.end.first_token_s)
        except KeyboardInterrupt:
            self._write(" [stopped]")
        except grpc.RpcError as error:
            self._write(("\n" if answer else "") + failure(self._server, error))
        finally:
            # Cancels the call if it still runs.
            stream.close()  # type: ignore[attr-defined]
        self._write("\n")
        if answer:
            self.turns = [*asked, pb.ChatMessage(role="assistant", content=answer)]

    def _stats(self) -> None:
        if self._figures:
            self._write(f"last answer: {self._figures}\n")
        try:
            status = self._client.status()
        except grpc.RpcError as error:
            self._write(f"{failure(self._server, error)}\n")
            return
        self._write(
            f"server: {len(status.replicas)} replica(s), {status.running} running,"
            f" {status.waiting} waiting, {status.tokens_committed} tokens committed,"
            f" {status.acceptance:.0%} of {status.draft_tokens} draft tokens accepted\n"
        )
