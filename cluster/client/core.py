"""What a client does, step by step, without doing any of it: no call, no sleep, no thread.

A plan is a generator of steps. The blocking and the asynchronous client carry out the same plans;
each step's result, or its grpc.RpcError, goes back into the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from cluster.client.channel import Lane
from cluster.client.retry import (
    Attempts,
    Continuation,
    OutOfTime,
    RetryPolicy,
    StreamBroken,
    is_repeatable,
    retry_after_s,
    with_less_time,
    with_seed,
)
from protos import lockstep_pb2 as pb

_STATUS_S = 10.0
_READY_PAUSE_S = 0.1
_OWN_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
)
"""What a client's own gRPC says without any server; all others tell of one."""
T = TypeVar("T")


class NotReady(TimeoutError):
    """No replica was ready in time."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Make a call. Its result is the answer, or with `stream` the call itself."""

    method: Any
    request: Any
    timeout_s: float | None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """The next message of a stream; None at its end."""

    call: Any


@dataclass(frozen=True, slots=True)
class Emit:
    """Give a chunk to the caller."""

    chunk: pb.GenerateChunk


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


Step = Ask | Read | Emit | Pause
Plan = Generator[Step, Any, T]


class Run(Generic[T]):
    """A plan that is being carried out: do `step`, send its result or its error, until it is None.

    Raises what the plan raises.
    """

    def __init__(self, plan: Plan[T]) -> None:
        self._plan = plan
        self.step: Step | None = None
        self._next(lambda: next(plan))

    def send(self, result: object) -> None:
        self._next(lambda: self._plan.send(result))

    def throw(self, error: grpc.RpcError) -> None:
        self._next(lambda: self._plan.throw(error))

    def close(self) -> None:
        self._plan.close()

    def _next(self, go_on: Callable[[], Step]) -> None:
        try:
            self.step = go_on()
        except StopIteration as end:
            self.step = None
            self.value: T = end.value


class Core:
    """The addresses and the plans. The address in use is kept until a call to it fails."""

    def __init__(
        self,
        open_channel: Callable[[str], Any],
        address: str | Sequence[str],
        api_key: str | None,
        retry: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        addresses = [address] if isinstance(address, str) else list(address)
        if not addresses:
            raise ValueError("address: at least one is needed")
        self.lanes = [Lane(open_channel(each)) for each in addresses]
        self._current = self.lanes[0]
        self._retry = retry
        self._clock = clock
        # Never in a log or a message: only here and on the wire.
        self.metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._reached = False
        """Whether any server has ever answered."""
        self.retries = 0
        """How often a call was asked again."""

    def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> Plan[pb.GenerateResponse]:
        attempts = self._attempts(request, timeout_s)
        request = with_seed(request)
        while True:
            lane = self._current
            asked = with_less_time(request, attempts.passed_s(self._clock()))
            try:
                response: pb.GenerateResponse = yield Ask(
                    lane.stub.Generate, asked, self._left_s(attempts, timeout_s)
                )
            except grpc.RpcError as error:
                broken = error
            else:
                self._reached = True
                return response
            yield Pause(self._pause_s(lane, attempts, broken))

    def stream(self, request: pb.GenerateRequest, timeout_s: float | None) -> Plan[None]:
        attempts = self._attempts(request, timeout_s)
        whole = Continuation(request)
        while True:
            lane = self._current
            asked = whole.request(attempts.passed_s(self._clock()))
            left_s = self._left_s(attempts, timeout_s)
            call = yield Ask(lane.stub.GenerateStream, asked, left_s, stream=True)
            broken: grpc.RpcError = StreamBroken()
            try:
                while (chunk := (yield Read(call))) is not None:
                    if (seen := whole.take(chunk)) is not None:
                        self._reached = True
                        attempts.progress()
                        yield Emit(seen)
            except grpc.RpcError as error:
                broken = error
            finally:
                call.cancel()
            if whole.whole:
                return
            if whole.ended:
                raise broken
            yield Pause(self._pause_s(lane, attempts, broken))

    def status(self) -> Plan[pb.StatusResponse]:
        """Of the first address that answers, the one in use first."""
        failed: grpc.RpcError | None = None
        for lane in self._in_order():
            try:
                status: pb.StatusResponse = yield Ask(
                    lane.stub.Status, pb.StatusRequest(), _STATUS_S
                )
            except grpc.RpcError as error:
                failed = failed or error
            else:
                self._reached = True
                return status
        assert failed is not None
        raise failed

    def ready(self) -> Plan[bool]:
        """Whether a server says that it is ready; False when none can be reached."""
        request = health_pb2.HealthCheckRequest()
        for lane in self._in_order():
            try:
                answer = yield Ask(lane.health.Check, request, _STATUS_S)
            except grpc.RpcError:
                continue
            self._reached = True
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return True
        return False

    def wait_until_ready(self, timeout_s: float) -> Plan[None]:
        """Raises NotReady."""
        deadline_s = self._clock() + timeout_s
        while not (yield from self.ready()):
            if self._clock() > deadline_s:
                raise NotReady(f"no replica was ready within {timeout_s:.0f} s")
            yield Pause(_READY_PAUSE_S)

    def _in_order(self) -> Iterator[Lane]:
        at = self.lanes.index(self._current)
        return iter(self.lanes[at:] + self.lanes[:at])

    def _attempts(self, request: pb.GenerateRequest, timeout_s: float | None) -> Attempts:
        own_s = request.timeout_s if request.HasField("timeout_s") else None
        return Attempts(self._retry, self._clock(), (timeout_s, own_s))

    def _left_s(self, attempts: Attempts, timeout_s: float | None) -> float | None:
        """What the caller's own bound leaves for the next attempt."""
        if timeout_s is None:
            return None
        return max(timeout_s - attempts.passed_s(self._clock()), 0.001)

    def _pause_s(self, lane: Lane, attempts: Attempts, error: grpc.RpcError) -> float:
        """Before the next attempt, which goes to the next address. Raises the error if none is
        to be made, or OutOfTime where only the call's own time forbids it."""
        now_s = self._clock()
        answered = error.code() not in _OWN_CODES or retry_after_s(error) is not None
        self._reached = self._reached or answered or attempts.served(now_s)
        pause_s = attempts.pause_s(error, now_s, reached=self._reached)
        if pause_s is None:
            if attempts.is_over(now_s) and is_repeatable(error):
                raise OutOfTime(error) from error
            raise error
        self.retries += 1
        # Another call may have moved on already.
        if self._current is lane:
            self._current = self.lanes[(self.lanes.index(lane) + 1) % len(self.lanes)]
        return pause_s
