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
from tests.chaos.hosted import HostedCluster
from tests.cluster.frontend.fuzz.messages import ANY
from tests.integration.conftest import Expected

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
    st.builds(lambda method, message: Call(method, message.SerializeToString()), GENERATE, ANY),
    st.builds(
        lambda method, message, *change: Call(
            method, changed(message.SerializeToString(), *change)
        ),
        GENERATE,
        ANY,
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
    cluster: HostedCluster, client: Client, expected: Expected
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
