"""When a call may be asked again, and what to ask then. Knows no channel, no clock, no address.

What a request gives is a function of the request, so a unary call can simply be repeated. A broken
stream is continued: asked again with the tokens that already came. The server gives no text for
them, so what it sends is what follows, token for token and character for character. One of several
choices is repeated, and what already came is left out.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from protos import lockstep_pb2 as pb

RETRY_AFTER_KEY = "retry-after"
"""Key in the trailing metadata of RESOURCE_EXHAUSTED; seconds."""

FINAL_KEY = "lockstep-final"
"""Key in the trailing metadata of an error that the server itself has decided on: the same request
would meet it again."""
_BREAKS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    # Of a proxy that knows no application yet, or no longer.
    grpc.StatusCode.NOT_FOUND,
)
"""What a dead process or a broken connection looks like, depending on what was on the way."""
_WHOLE = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
"""How a choice ends of which there is no more to come."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often and for how long a call is asked again. Times in seconds."""

    attempts_max: int = 60
    """Calls in a row that bring nothing; 1 is no retry."""
    give_up_s: float = 60.0
    """From the first failure, while nothing comes. Serve replaces a dead proxy within 40 s."""
    reach_s: float = 2.0
    """The same for a client that no server has ever answered: the address may be wrong."""
    backoff_s: float = 0.05
    """First pause; each failure in a row doubles it. Of every pause up to a half is random."""
    backoff_s_max: float = 2.0

    def __post_init__(self) -> None:
        """Raises ValueError, which names the field."""
        if self.attempts_max < 1:
            raise ValueError(f"attempts_max: must be at least 1, is {self.attempts_max}")
        for name in ("give_up_s", "reach_s", "backoff_s", "backoff_s_max"):
            # Written so that NaN fails too.
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must be at least 0, is {getattr(self, name)}")


NO_RETRY = RetryPolicy(attempts_max=1)
_CONNECTING_S = 10.0
"""An attempt that lasts longer has reached a server: connecting to an address takes a second."""
_LAST_S = 0.01
"""With less of its own time left a call is not asked again."""


def own_error(code: grpc.StatusCode, details: str) -> grpc.RpcError:
    """An error that no server has sent."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details)


def is_repeatable(error: grpc.RpcError) -> bool:
    """Whether the error tells of a dead process or connection, not of the request."""
    return error.code() in _BREAKS and trailing(error, FINAL_KEY) is None


def trailing(error: grpc.RpcError, name: str) -> str | None:
    """A value of the error's trailing metadata, which a server alone can have sent."""
    for key, value in error.trailing_metadata() or ():
        if key == name:
            return str(value)
    return None


class Attempts:
    """The bounds of one call over all its attempts. Time and luck are arguments."""

    def __init__(
        self,
        policy: RetryPolicy,
        begun_s: float,
        limits_s: tuple[float | None, ...] = (),
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`limits_s`: times that bound the call as a whole; `draw` gives numbers in [0, 1)."""
        self._policy = policy
        self._begun_s = begun_s
        given = [limit_s for limit_s in limits_s if limit_s is not None]
        self._deadline_s = begun_s + min(given) if given else None
        self._draw = draw
        self._first = True
        self._failures = 0
        self._failing_since_s: float | None = None
        self._attempt_s = begun_s
        """When the last attempt began."""

    def served(self, now_s: float) -> bool:
        """Whether a server had the attempt that has ended now, though nothing came of it."""
        return now_s - self._attempt_s > _CONNECTING_S

    def passed_s(self, now_s: float) -> float:
        """Since the first attempt began; 0 during it."""
        return 0.0 if self._first else now_s - self._begun_s

    def is_over(self, now_s: float) -> bool:
        """Whether the call's own time has passed, but for what is too little to ask again in."""
        return self._deadline_s is not None and now_s > self._deadline_s - _LAST_S

    def progress(self) -> None:
        """Something came: failures are counted anew."""
        self._failures, self._failing_since_s = 0, None

    def pause_s(self, error: grpc.RpcError, now_s: float, *, reached: bool) -> float | None:
        """How long to wait before the next attempt; None if there shall be none."""
        policy = self._policy
        self._first = False
        self._failures += 1
        # An attempt that lasts longer than `give_up_s` was served for some of that time.
        if self._failing_since_s is None or now_s - self._attempt_s > policy.give_up_s:
            self._failing_since_s = now_s
        doubled = 2.0 ** min(self._failures - 1, 60)  # Of 1,024 doublings there is no float.
        pause_s = min(policy.backoff_s * doubled, policy.backoff_s_max)
        pause_s *= 1.0 - 0.5 * self._draw()
        if self._deadline_s is not None:
            # What is left of the call's own time is used to its end, not slept away.
            pause_s = min(pause_s, 0.5 * max(self._deadline_s - now_s, 0.0))
        if not is_repeatable(error):
            return None
        patience_s = policy.give_up_s if reached else min(policy.reach_s, policy.give_up_s)
        if self._failures >= policy.attempts_max:
            return None
        if now_s + pause_s > self._failing_since_s + patience_s:
            return None
        if self.is_over(now_s):
            return None
        self._attempt_s = now_s + pause_s
        return pause_s


def with_less_time(request: pb.GenerateRequest, passed_s: float) -> pb.GenerateRequest:
    """A copy whose timeout_s counts from when the first attempt began."""
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    if passed_s > 0 and request.HasField("timeout_s"):
        again.timeout_s = max(request.timeout_s - passed_s, 0.001)
    return again


def with_seed(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """A copy that gives the same answer whenever it is asked: a seed is drawn if one is needed.

    Not for one with committed tokens: another seed than theirs would be wrong, as the server says.
    """
    fixed = pb.GenerateRequest()
    fixed.CopyFrom(request)
    if request.temperature > 0 and not (request.HasField("seed") or request.committed_token_ids):
        fixed.seed = secrets.randbelow(1 << 63)
    return fixed


class Continuation:
    """One stream, put together from the pieces of several."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = with_less_time(request, 0.0)
        self._seen_any = False
        self._fruitful = False
        """Whether this attempt has brought tokens."""
        self._recovered = 0
        self._choices = max(request.n, 1)
        self._ends: dict[int, pb.End] = {}
        """By choice."""
        self._came: Counter[tuple[int, str]] = Counter()
        """How much of each choice's parts has come in all attempts."""
        self._at: Counter[tuple[int, str]] = Counter()
        """The same in this attempt, where it began anew."""

    def request(self, passed_s: float) -> pb.GenerateRequest:
        """What to ask in the next attempt, `passed_s` after the first one began."""
        self._recovered += self._fruitful
        self._fruitful = False
        if self._choices > 1:
            self._at.clear()
        return with_less_time(self._request, passed_s)

    def take(self, chunk: pb.GenerateChunk) -> pb.GenerateChunk | None:
        """The chunk as the caller should see it; None if it brings nothing.

        The first one that the caller sees has the request id and the seed, and no other has.
        """
        if chunk.HasField("seed"):
            self._request.seed = chunk.seed
        if self._choices == 1:
            self._request.committed_token_ids.extend(chunk.token_ids)
        self._fruitful |= bool(chunk.token_ids)
        seen = self._new(chunk)
        if not (seen.text or seen.token_ids or seen.tool_calls or seen.HasField("end")):
            # A call that fails before its first token begins with such a chunk, too.
            return None
        for name in ("request_id", "seed"):
            seen.ClearField(name)
        if not self._seen_any:
            self._seen_any = True
            seen.request_id = self._request.request_id
            if self._request.temperature > 0 and self._request.HasField("seed"):
                seen.seed = self._request.seed
        if chunk.HasField("end"):
            seen.end.recovered += self._recovered
            self._ends[chunk.index] = seen.end
        return seen

    def _new(self, chunk: pb.GenerateChunk) -> pb.GenerateChunk:
        """What no earlier attempt has brought."""
        new = pb.GenerateChunk()
        new.CopyFrom(chunk)
        for name in ("text", "token_ids", "logprobs", "tool_calls"):
            part, place = getattr(new, name), (chunk.index, name)
            old = min(self._came[place] - self._at[place], len(part))
            self._at[place] += len(part)
            self._came[place] += len(part) - old
            if name == "text":
                new.text = part[old:]
            else:
                del part[:old]
        if chunk.index in self._ends:
            new.ClearField("end")
        return new

    @property
    def ended(self) -> bool:
        """Whether the server has said that it ends the request; no attempt may follow."""
        return self.whole or any(end.finish_reason not in _WHOLE for end in self._ends.values())

    @property
    def whole(self) -> bool:
        """Whether the caller has all there is: an error after that means nothing."""
        ends = self._ends.values()
        return len(ends) == self._choices and all(end.finish_reason in _WHOLE for end in ends)
