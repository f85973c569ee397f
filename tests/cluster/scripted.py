"""A real gRPC server in this process that breaks its calls to batch.

Its answers are made by the frontend's own text code from the tokens of its script.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from grpc import StatusCode
from hypothesis import strategies as st

from cluster.client import RetryPolicy
from cluster.frontend.text import TextRules, TextStream
from protos import lockstep_pb2 as pb, lockstep_pb2_grpc
from tests.cluster.fakes import SAMPLES, tokenizer

PROMPT = "the quick"
PROMPT_IDS = tokenizer().encode(PROMPT).ids
QUICK = RetryPolicy(backoff_s=0.001, backoff_s_max=0.002)
ACTOR_DIED = "The actor died unexpectedly before finishing this task.\n\tclass_name: ServeReplica"
BREAKS = [
    (StatusCode.UNAVAILABLE, "Stream removed (recvmsg:Connection reset by peer (104))"),
    (StatusCode.UNAVAILABLE, "the server is stopping"),
    (StatusCode.INTERNAL, ACTOR_DIED),
    (StatusCode.UNKNOWN, "Stream removed"),
    (StatusCode.CANCELLED, "Client for request 1 disconnected."),
    (StatusCode.NOT_FOUND, "Application 'lockstep' not found."),
]


@dataclass
class Script:
    """What the server does with its next calls, and what it was asked."""

    tokens: list[int] = field(default_factory=list)
    sizes: Sequence[int] = (3,)
    """Tokens of the chunks, over and over."""
    cuts: list[tuple[int, StatusCode, str] | None] = field(default_factory=list)
    """For each call: break before this chunk with this status; None and later calls run through."""
    reason: int = pb.FINISH_REASON_LENGTH
    status_at_end: tuple[StatusCode, str] | None = None
    trailing: tuple[tuple[str, str], ...] = ()
    silent: bool = False
    """End with OK where it breaks, as a generator that was closed would."""
    refuses: bool = False
    """Begin a call that breaks before its first chunk with an empty one, as a frontend does."""
    asked: list[pb.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)


class Server(lockstep_pb2_grpc.LockstepServicer):
    """Answers as a frontend does, and breaks as its script says."""

    def __init__(self) -> None:
        self.script = Script()

    def _begin(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> tuple[int, StatusCode, str] | None:
        self.script.asked.append(request)
        self.script.metadata.append(dict(context.invocation_metadata()))
        context.set_trailing_metadata(self.script.trailing)
        return self.script.cuts.pop(0) if self.script.cuts else None

    def GenerateStream(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateChunk]:
        cut = self._begin(request, context)
        if cut is not None and cut[0] == 0 and self.script.refuses:
            yield pb.GenerateChunk()
        for number, chunk in enumerate(chunks_of(self.script, request)):
            if cut is not None and number == cut[0]:
                break
            yield chunk
        else:
            cut = None
        if cut is not None and self.script.silent:
            return
        if cut is not None:
            context.abort(cut[1], cut[2])
        if self.script.status_at_end is not None:
            context.abort(*self.script.status_at_end)

    def Status(self, _request: pb.StatusRequest, _context: object) -> pb.StatusResponse:
        return pb.StatusResponse(ready=True, replicas=[pb.ReplicaStatus(target="scripted")])

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> pb.GenerateResponse:
        cut = self._begin(request, context)
        if cut is not None:
            context.abort(cut[1], cut[2])
        parts = list(chunks_of(self.script, request))
        return pb.GenerateResponse(
            text="".join(part.text for part in parts),
            token_ids=[token for part in parts for token in part.token_ids],
            end=parts[-1].end,
        )


def chunks_of(script: Script, request: pb.GenerateRequest) -> Iterator[pb.GenerateChunk]:
    committed = list(request.committed_token_ids)
    assert committed == script.tokens[: len(committed)], "asked with tokens it never gave"
    seed = request.seed if request.HasField("seed") else 77 if request.temperature > 0 else None
    chunk = pb.GenerateChunk(request_id=request.request_id, seed=seed)
    text = TextStream(tokenizer(), PROMPT_IDS, TextRules(tuple(request.stop)))
    stop = text.push(committed).stop
    taken = len(committed)
    sizes = itertools.cycle(script.sizes)
    while stop is None and taken < len(script.tokens):
        tokens = script.tokens[taken : taken + next(sizes)]
        piece = text.push(tokens)
        stop = piece.stop
        taken += piece.tokens
        chunk.text = piece.text
        chunk.token_ids.extend(tokens[: piece.tokens])
        yield chunk
        chunk = pb.GenerateChunk()
    if stop is None:
        rest = text.finish()
        chunk.text, stop = rest.text, rest.stop
    chunk.end.CopyFrom(
        pb.End(
            finish_reason=pb.FINISH_REASON_STOP if stop else script.reason,
            usage=pb.Usage(prompt_tokens=len(PROMPT_IDS), completion_tokens=taken),
            recovered=1,
            seed=seed,
            stop=stop,
        )
    )
    yield chunk


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Script, pb.GenerateRequest]:
    """Texts with characters of one to four tokens, stop strings that come, and that only begin."""
    alphabet = st.sampled_from(sorted(set("".join(SAMPLES))))
    text = draw(st.text(alphabet, min_size=1, max_size=40))
    tokens = tokenizer().encode(text).ids
    if draw(st.booleans()):
        # Ends within a character, or has bytes that are no character at all.
        tokens = tokens[: draw(st.integers(1, len(tokens)))] + draw(
            st.lists(st.integers(2, 257), max_size=4)
        )
    at = draw(st.integers(0, len(text) - 1))
    stop = text[at : at + draw(st.integers(1, 5))]
    stops = draw(st.sampled_from([[], [stop], [stop + "never"], [stop + "never", stop[-1] + "!"]]))
    cut = st.tuples(st.integers(0, 6), st.sampled_from(BREAKS)).map(
        lambda made: (made[0], *made[1])
    )
    script = Script(
        tokens=tokens,
        sizes=draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)),
        cuts=list(draw(st.lists(cut, max_size=6))),
        silent=draw(st.booleans()),
        refuses=draw(st.booleans()),
    )
    request = pb.GenerateRequest(
        prompt=PROMPT,
        stop=stops,
        temperature=draw(st.sampled_from([0.0, 0.7])),
        request_id=draw(st.sampled_from(["", "mine"])),
        timeout_s=100.0,
        committed_token_ids=tokens[: draw(st.sampled_from([0, 0, 1, 4]))],
    )
    if request.committed_token_ids and request.temperature:
        request.seed = 77
    return script, request


@dataclass(frozen=True)
class Running:
    server: Server
    address: str


def run_server(servicer: Server | None = None) -> Iterator[Running]:
    servicer = servicer or Server()
    server = grpc.server(ThreadPoolExecutor(4))
    lockstep_pb2_grpc.add_LockstepServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Running(servicer, f"127.0.0.1:{port}")
    server.stop(None).wait()


def joined(chunks: Sequence[pb.GenerateChunk]) -> tuple[str, list[int]]:
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return "".join(chunk.text for chunk in chunks), tokens
