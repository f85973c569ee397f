"""The scheduler and one replica in one process: no Ray, no network, the same cores.

What `lockstep.LLM`, `lockstep verify` and the benchmarks run, and what the cluster's own cost is
measured against.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from scheduler.config import SchedulerConfig
from scheduler.decoding import TokenLogprobs
from scheduler.errors import InvalidRequest, LockstepError, Overloaded
from scheduler.messages import (
    Action,
    Batch,
    Cancel,
    Dispatch,
    Emit,
    Event,
    Finish,
    FinishReason,
    Reject,
    RejectCode,
    Release,
    ReplicaJoined,
    ReplicaSpec,
    Request,
    StepDone,
    StepFailed,
    StepResult,
    Submit,
    Usage,
)
from scheduler.scheduler import Scheduler

REPLICA_ID = "local"
NO_QUEUE_LIMITS = {"waiting_requests_max": 10**9, "waiting_tokens_max": 10**12}
"""Settings of the scheduler where nobody waits for a place: nothing is refused for load."""


class Runner(Protocol):
    """What runs batches: a `replicas.replica.Replica`, or a fake one."""

    spec: ReplicaSpec

    @property
    def broken(self) -> Exception | None:
        """Why nothing can run any more; asked with `isolates` only."""
        ...

    def step(self, batch: Batch) -> StepResult: ...

    def draft_ahead(self, batch: Batch) -> None:
        """Asked where the spec says that it overlaps."""
        ...

    def release(self, sequence_ids: Iterable[str]) -> None: ...


@dataclass
class Output:
    """What one request has received so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each of the tokens, where it was asked for."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token of the prompt but the first."""
    reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    message: str = ""
    finished_s: float | None = None


class LocalEngine:
    """Feeds the scheduler's batches to one replica, one after the other, in the caller's thread."""

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig,
        clock: Callable[[], float] = monotonic,
        check: bool = False,
        isolates: bool = False,
    ) -> None:
        """`isolates`: a batch that raises fails the row that causes it, as in a cluster; else it
        raises to the caller."""
        self.scheduler = Scheduler(config)
        self.outputs: dict[str, Output] = {}
        self.results: list[StepResult] = []
        """Results of all batches, for figures; clear it at will."""
        self._runner = runner
        self._clock = clock
        self._check = check
        self._isolates = isolates
        self.error: Exception | None = None
        """What the last batch raised that was told to the scheduler."""
        self._batches: deque[Batch] = deque()
        self._feed(ReplicaJoined(REPLICA_ID, runner.spec))

    def submit(self, request: Request) -> Output:
        """Hand a request in; raises InvalidRequest or Overloaded when the pool refuses it."""
        held = self.outputs.get(request.id)
        if held is not None and held.finished_s is None:
            raise InvalidRequest("id", "a request with this id is live")
        output = self.outputs[request.id] = Output()
        self._feed(Submit(request))
        return output

    def cancel(self, request_id: str) -> None:
        """End a request; one that is unknown or has ended is left as it is."""
        self._feed(Cancel(request_id))

    def advance(self) -> bool:
        """Run the oldest batch; False when there is none, or nothing can run any more."""
        if not self._batches:
            return False
        batch = self._batches.popleft()
        try:
            result = self._runner.step(batch)
        except Exception as error:
            if not self._isolates:
                raise
            self.error = error
            if self._runner.broken is not None:
                return False
            said = f"{type(error).__name__}: {error}"
            self._feed(StepFailed(batch.replica_id, batch.id, said))
            return True
        self.results.append(result)
        self._feed(StepDone(result))
        return True

    def run(self) -> None:
        """Run until every request has finished."""
        while self.advance():
            pass
        self.check_finished()

    def check_finished(self) -> None:
        """With no batch left, every request has its end."""
        unfinished = [key for key, output in self.outputs.items() if output.reason is None]
        assert not unfinished, f"the scheduler left {len(unfinished)} requests without a batch"

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Run the requests to their end; outputs in the caller's order. Raises InvalidRequest or
        Overloaded for the first request that is refused; those before it stay submitted."""
        outputs = [self.submit(request) for request in requests]
        self.run()
        return outputs

    def _feed(self, event: Event) -> None:
        now_s = self._clock()
        actions = self.scheduler.step(event, now_s)
        if self._check:
            self.scheduler.check_integrity()
        refused: LockstepError | None = None
        for action in actions:
            if isinstance(action, Reject):
                del self.outputs[action.request_id]
                refused = _error_of(action)
            else:
                self._act(action, now_s)
        if refused is not None:
            raise refused

    def _act(self, action: Action, now_s: float) -> None:
        match action:
            case Dispatch(batch):
                if self._runner.spec.overlaps:
                    self._runner.draft_ahead(batch)
                self._batches.append(batch)
            case Release(_, sequence_ids):
                self._runner.release(sequence_ids)
            case Emit(request_id, start, (), extras):
                self.outputs[request_id].prompt_logprobs[start : start + len(extras)] = extras
            case Emit(request_id, start, tokens, extras):
                output = self.outputs[request_id]
                assert start == len(output.tokens), "tokens come in order, none twice"
                output.tokens.extend(tokens)
                output.logprobs.extend(extras)
            case Finish(request_id, reason, usage, message):
                output = self.outputs[request_id]
                assert output.reason is None, "a request finishes once"
                output.reason, output.usage, output.message = reason, usage, message
                output.finished_s = now_s


def _error_of(reject: Reject) -> LockstepError:
    if reject.code is RejectCode.OVERLOADED:
        return Overloaded(reject.message, reject.retry_after_s)
    return InvalidRequest(reject.field, reject.message)
