"""Proves: whatever bytes a client sends, it gets a typed status at once, and the server goes on.

Thousands of malformed calls through real gRPC: bytes that are no message, messages that were cut or
changed on the way, fields with wild values, and metadata that means something to Serve. None may
end as INTERNAL or UNKNOWN, none may take long, and 500 sound calls among them are answered right.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from cluster.client import Client
from protos import lockstep_pb2 as pb
from tests.integration.conftest import Expected, RunningCluster

pytestmark = pytest.mark.ray

BATCH = 25
EXAMPLES = 200
"""BATCH * EXAMPLES calls in all."""
SOUND = [f"a sound one, number {number}" for number in range(20)]
SOUND_CALLS = 500
"""Among the others."""
ANSWER_S = 5.0
"""Much more than any refusal needs: machines that do other things as well are slow at times."""
HANG_S = 60.0
"""The calls' own deadline: a call that hangs ends as DEADLINE_EXCEEDED, and far too late."""

TYPED = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,  # metadata that says that the call was passed on
        grpc.StatusCode.NOT_FOUND,  # metadata that names another application
        grpc.StatusCode.DEADLINE_EXCEEDED,  # the request's own, of a microsecond
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(frozen=True)
class Call:
    method: str
    data: bytes
    metadata: tuple[tuple[str, str | bytes], ...] = ()

    def __repr__(self) -> str:
        return f"Call({self.method!r}, {len(self.data)} bytes {self.data[:200]!r}, {self.metadata})"


# --------------------------------------------------------------------------- what is sent

# A valid call must be cheap: few tokens. Everything else may be anything.
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT32 = st.one_of(st.integers(0, 400), st.integers(0, 2**32 - 1))
FLOATS = st.one_of(st.floats(), st.sampled_from([0.0, -0.0, 1e-320, 1.0, 1e308, -1.0]))
TEXT = st.one_of(st.text(max_size=20), st.sampled_from(["", "\x00", "x" * 5000, "😀" * 300]))
LENGTHS = st.sampled_from([1, 2, 3, 64, 65, 511, 512, 513, 20_000])
STOPS_BYTES = 5 << 20


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    """A message that parses; most of them make no sense."""
    message = pb.GenerateRequest(max_new_tokens=draw(st.sampled_from([1, 2, 3, 0, -1, 2**31 - 1])))
    if draw(st.booleans()):
        message.prompt = draw(TEXT)
    else:
        message.prompt_token_ids.ids.extend([draw(UINT32)] * draw(LENGTHS))
    names = st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True)
    for name in draw(names):
        value = draw(FIELDS[name])
        holder, _, field = name.rpartition(".")
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(getattr(message, holder) if holder else message, field, value)
    return message


def repeated(text: str, times: int) -> list[str]:
    """So often, but a few megabytes at most: more than the frontend takes, and not a hundred, which
    would be a test of how fast this machine copies."""
    return [text] * min(times, STOPS_BYTES // max(len(text.encode()), 1))


FIELDS: dict[str, st.SearchStrategy[object]] = {
    "temperature": FLOATS,
    "n": INT32,
    "top_k": INT32,
    "top_p": FLOATS,
    "min_p": FLOATS,
    "seed": INT64,
    "stop": st.one_of(st.lists(TEXT, max_size=3), st.builds(repeated, TEXT, LENGTHS)),
    "stop_token_ids": st.builds(lambda token, n: [token] * n, UINT32, LENGTHS),
    "ignore_eos": st.booleans(),
    "speculation": st.booleans(),
    "draft_len": INT32,
    "timeout_s": FLOATS,
    "request_id": TEXT,
    "committed_token_ids": st.builds(lambda token, n: [token] * n, UINT32, LENGTHS),
    "priority": INT32,
}


def changed(data: bytes, at: int, value: int, cut: int) -> bytes:
    """One byte replaced, and so many cut off the end."""
    if data:
        at %= len(data)
        data = data[:at] + bytes([value]) + data[at + 1 :]
    return data[: max(len(data) - cut, 0)]


GENERATE = st.sampled_from(["Lockstep/Generate", "Lockstep/GenerateStream"])
METHODS = st.sampled_from(
    [
        *("Lockstep/Generate", "Lockstep/GenerateStream", "Lockstep/Status", "Lockstep/Nothing"),
        *("Health/Check", "Health/List", "Nothing/Generate"),
    ]
)
METADATA = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(
                [
                    *("application", "request_id", "session_id", "multiplexed_model_id"),
                    *("traceparent", "authorization", "x-forwarded-for", "x"),
                ]
            ),
            st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30),
        ),
        st.tuples(st.just("x-bin"), st.binary(max_size=30)),
    ),
    max_size=3,
).map(tuple)
CHEAP = pb.GenerateRequest(prompt="x", max_new_tokens=1).SerializeToString()

CALLS = st.one_of(
    st.builds(Call, METHODS, st.binary(max_size=60)),
    st.builds(
        lambda method, message: Call(method, message.SerializeToString()), GENERATE, requests()
    ),
    st.builds(
        lambda method, message, *change: Call(
            method, changed(message.SerializeToString(), *change)
        ),
        GENERATE,
        requests(),
        st.integers(0, 10_000),
        st.integers(0, 255),
        st.integers(0, 8),
    ),
    st.builds(Call, GENERATE, st.just(CHEAP), METADATA),
)


# --------------------------------------------------------------------------- what comes back


def service(method: str) -> str:
    package = "grpc.health.v1" if method.startswith("Health") else "lockstep.v1"
    return f"/{package}.{method}"


class Raw:
    """Calls of bytes, a batch of them at once, each in a thread of its own."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(address, options=options)
        self.threads = ThreadPoolExecutor(BATCH)
        self.answers: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.asked_again = 0
        self.wrong: list[str] = []

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.threads.shutdown()
        self.channel.close()

    def batch(self, calls: list[Call]) -> None:
        for call, (code, details, took_s) in zip(
            calls, self.threads.map(self._answer, calls), strict=True
        ):
            self.answers[code.name] += 1
            if code is grpc.StatusCode.OK:
                continue
            for _ in range(2):
                if code not in TYPED or took_s < ANSWER_S:
                    break
                # The call's fault, or that of whatever else this machine was doing?
                self.asked_again += 1
                code, details, took_s = self._answer(call)
            self.slowest_s = max(self.slowest_s, took_s)
            if code not in TYPED or took_s >= ANSWER_S:
                self.wrong.append(f"{call} {code.name} {details!r} after {took_s:.3f} s")

    def _answer(self, call: Call) -> tuple[grpc.StatusCode, str, float]:
        """Status, details and seconds of one call."""
        started_s = time.monotonic()
        try:
            if call.method.endswith("Stream"):
                stream = self.channel.unary_stream(service(call.method))
                for _chunk in stream(call.data, metadata=call.metadata, timeout=HANG_S):
                    pass
            else:
                unary = self.channel.unary_unary(service(call.method))
                unary(call.data, metadata=call.metadata, timeout=HANG_S)
        except grpc.RpcError as error:
            return error.code(), error.details(), time.monotonic() - started_s
        return grpc.StatusCode.OK, "", time.monotonic() - started_s


def test_thousands_of_malformed_calls_get_a_status_each_and_harm_nobody(
    cluster: RunningCluster, client: Client, expected: Expected
) -> None:
    raw = Raw(cluster.address)

    @settings(
        max_examples=EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.lists(CALLS, min_size=BATCH, max_size=BATCH))
    def send(calls: list[Call]) -> None:
        raw.batch(calls)

    def ask(number: int) -> list[int]:
        prompt = SOUND[number % len(SOUND)]
        return list(client.generate(pb.GenerateRequest(prompt=prompt, max_new_tokens=16)).token_ids)

    right = expected(SOUND, 16)
    begun_s = time.monotonic()
    with raw, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, number) for number in range(SOUND_CALLS)]
        send()
    total = sum(raw.answers.values())
    print(f"\n{total} calls in {time.monotonic() - begun_s:.0f} s: {dict(raw.answers)}")
    print(f"slowest refusal {raw.slowest_s:.3f} s, {raw.asked_again} calls asked again")
    assert raw.wrong == []
    assert total >= BATCH * EXAMPLES
    assert raw.answers["INVALID_ARGUMENT"] > total / 4
    assert raw.answers["OK"] > 0, "some of them were no mistake"
    for number, answer in enumerate(answers):
        assert answer.result(timeout=HANG_S) == right[number % len(SOUND)]


@pytest.mark.parametrize(
    "method", ["Lockstep/Generate", "Lockstep/GenerateStream", "Lockstep/Status", "Health/Check"]
)
def test_bytes_that_are_no_message_are_named_as_such(cluster: RunningCluster, method: str) -> None:
    # Its first field is a text, and this is none; StatusRequest has no field at all.
    no_text = [] if method.endswith("Status") else [b"\x0a\x01\xff"]
    for data in (b"\xff", b"\x0a\x05ab", b"\xff" * 100_000, *no_text):
        with grpc.insecure_channel(cluster.address) as channel:
            call = channel.unary_stream(service(method))(data, timeout=HANG_S)
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith("request: ")


def test_serves_own_methods_answer_what_does_not_parse_with_unknown(
    cluster: RunningCluster,
) -> None:
    """Not ours: Serve registers them itself, and gRPC says UNKNOWN to what it cannot parse.

    Asserted exactly, so that a change is noticed.
    """
    with grpc.insecure_channel(cluster.address) as channel:
        call = channel.unary_unary("/ray.serve.RayServeAPIService/Healthz")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff", timeout=HANG_S)
        assert caught.value.code() is grpc.StatusCode.UNKNOWN
        assert "DecodeError" in caught.value.details()
