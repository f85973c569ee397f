"""What comes back for one call: the deltas of its sequences, until all have ended.

Made and closed by the service. Knows the pool by its token updates, and no protocol. Logs sizes and
times of a call, never texts or tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from grpc import StatusCode

from cluster.config import ClusterConfig
from cluster.frontend.calls import Delta, GenerateCall, SequenceEnd, call_field
from cluster.frontend.pool_session import InFlightRequest, ShardRouter
from cluster.frontend.reasoning import ReasoningReader
from cluster.frontend.status_codes import CODES, Refusal, Refused, refusal_of_finish
from cluster.frontend.text import TextStream
from cluster.frontend.tools import CallDelta, ToolReader
from cluster.metrics import CallRecord, FrontendMeter
from scheduler.decoding import TokenLogprobs
from scheduler.messages import Finish, FinishReason, Request, Usage

log = logging.getLogger("lockstep.frontend")

_CHUNKS_PER_S = 200.0
"""Of all streams together: a chunk costs over a millisecond of CPU, so the more streams there are,
the longer each waits between two chunks."""
_USAGE_WAIT_S = 1.0
"""How long the end of a sequence with a stop string waits for the pool's figures."""
_TEXT_INLINE_TOKENS = 256
"""More of them are made text on a thread, off the event loop."""


@dataclass(slots=True)
class AnswerSequence:
    """One sequence on its way."""

    index: int
    live: InFlightRequest
    text: TextStream
    tools: ToolReader | None = None
    """Where it may call some."""
    reasoning: ReasoningReader | None = None
    """Where it may have some."""
    reasoning_tokens: int = 0
    taken: int = 0
    """Tokens of `live` that the text has seen."""
    called: bool = False
    """Whether they hold a whole call of a tool."""
    stop: str | None = None
    """The stop string that was found."""
    said: str = ""
    """Text for the next delta."""
    reasoned: str = ""
    """Reasoning for it."""
    tokens: list[int] = field(default_factory=list)
    """Tokens for it, the last ones that were taken."""

    def push(self, new: Sequence[int]) -> None:
        """Make text of tokens, up to the first stop string."""
        used = 0
        while self.stop is None and used < len(new):
            reader, within = self.reasoning, False
            part = new[used:]
            if reader is not None and not reader.settled:  # its tokens are counted
                within, part = reader.within, part[:1]
            piece = self.text.push(part)
            self._read(piece.text)
            self.reasoning_tokens += reader is not None and within and reader.within
            self.stop = piece.stop
            used += piece.tokens
        self.taken += used
        self.tokens += new[:used]

    def finish(self) -> None:
        """No more tokens: what is held back is text, unless it is behind a stop string."""
        if self.stop is None:
            piece = self.text.finish()
            self._read(piece.text)
            self.stop = piece.stop
        self._read("", ended=True)

    def _read(self, text: str, ended: bool = False) -> None:
        if self.reasoning is None:
            self.said += text
            return
        reasoned, said = self.reasoning.push(text, ended)
        self.reasoned += reasoned
        self.said += said

    @property
    def prompt(self) -> Sequence[int]:
        return self.live.request.prompt

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Of each prompt token but the first, where they were asked for; whole with the first
        delta of the sequence."""
        return self.live.prompt_logprobs


class Answer:
    """Iterate over it for the deltas, once; raises Refused for what the pool refuses or loses.

    The iteration ends with the last sequence, or with the first that is not served in full.
    """

    def __init__(
        self,
        call: GenerateCall,
        arrived_s: float,
        router: ShardRouter,
        meter: FrontendMeter,
        config: ClusterConfig,
    ) -> None:
        self.call = call
        self._arrived_s = self._submitted_s = arrived_s
        self._router = router
        self._meter = meter
        self._config = config.frontend
        self.sequences: list[AnswerSequence] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.status = StatusCode.CANCELLED
        """How it ended for the client: it has left, unless it was told something else."""

    def submit(
        self,
        request: Request,
        text: TextStream,
        reasoning: ReasoningReader | None,
        tools: ToolReader | None,
    ) -> None:
        """Hand one more sequence to the pool."""
        assert request.timeout_s is not None
        if not self.sequences:
            self._submitted_s = time.monotonic()
        left_s = self._arrived_s + request.timeout_s - time.monotonic()
        live = self._router.submit(request, left_s)
        self.sequences.append(AnswerSequence(len(self.sequences), live, text, tools, reasoning))

    def seed(self, index: int) -> int | None:
        """Of a sequence that is sampled."""
        sampling = self.sequences[index].live.request.sampling
        return sampling.seed if self.call.sampled else None

    def cancel(self) -> None:
        """Cancel what has not ended."""
        for task in self._tasks:
            task.cancel()
        for sequence in self.sequences:
            if not sequence.live.ended.is_set():
                self._router.cancel(sequence.live)

    def close(self) -> CallRecord:
        """Cancel what has not ended; what became of the call."""
        self.cancel()
        lives = [sequence.live for sequence in self.sequences]
        served = [live for live in lives if live.reject is None]
        if rejects := [live.reject for live in lives if live.reject is not None]:
            self._meter.refused(CODES[rejects[0].code])
        record = CallRecord(
            request_id=self.call.request_id or lives[0].pool_id,
            traceparent=self.call.caller.traceparent,
            status=self.status.name,
            sequences=len(lives),
            prompt_tokens=sum(len(live.request.prompt) for live in served),
            new_tokens=sum(len(live.tokens) for live in served),
            arrived_s=self._arrived_s,
            submitted_s=self._submitted_s,
            first_token_s=min((live.first_s for live in lives if live.first_s), default=0.0),
            ended_s=time.monotonic(),
            usages=[live.finish.usage for live in lives if live.finish is not None],
        )
        self._meter.answered(record)
        log.info("%s", record)
        return record

    async def __aiter__(self) -> AsyncIterator[Delta]:
        left = len(self.sequences)
        source = self._of(self.sequences[0]) if left == 1 else self._merged()
        try:
            async for delta in source:
                refusal = delta.end.refusal if delta.end is not None else None
                left -= delta.end is not None
                if refusal is not None:
                    self.status = refusal.code
                elif not left:
                    self.status = StatusCode.OK
                if self.call.stream:
                    self._meter.chunk()
                yield delta
                if refusal is not None:
                    return
        except Refused as refused:
            self.status = refused.refusal.code
            raise

    async def _merged(self) -> AsyncIterator[Delta]:
        """The deltas of several sequences as they come."""
        ready: asyncio.Queue[Delta | Exception] = asyncio.Queue(maxsize=1)

        async def pump(sequence: AnswerSequence) -> None:
            try:
                async for delta in self._of(sequence):
                    await ready.put(delta)
            except Exception as error:
                # Raised where the deltas are read.
                await ready.put(error)

        self._tasks = [asyncio.create_task(pump(sequence)) for sequence in self.sequences]
        left = len(self._tasks)
        while left:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            left -= item.end is not None
            yield item

    async def _of(self, sequence: AnswerSequence) -> AsyncIterator[Delta]:
        """Of one sequence: text and tokens with pauses between, the last ones with the end.

        Without a stream and without stop strings nothing is looked at before the end.
        """
        live, streamed = sequence.live, self.call.stream
        await self._pass_over(sequence)
        if self.call.max_new_tokens == 0:
            # One is computed, which ends the request, and is not told of.
            await live.ended.wait()
            yield self._delta(sequence, await self._end(sequence))
            return
        update = live.changed if streamed or self.call.stop else live.ended
        while sequence.stop is None and not live.ended.is_set():
            await update.wait()
            live.changed.clear()
            await self._take(sequence)
            if not sequence.tokens or sequence.stop is not None or live.ended.is_set():
                continue
            if streamed:
                yield self._delta(sequence)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await live.ended.wait()
        await self._take(sequence)
        try:
            end = await self._end(sequence)
        except Refused:
            if sequence.tokens and streamed:
                yield self._delta(sequence)
            raise
        yield self._delta(sequence, end)

    async def _pass_over(self, sequence: AnswerSequence) -> None:
        """Take the tokens that the client has, and say nothing of them."""
        live, had = sequence.live, len(self.call.committed_token_ids)
        if self.call.seen_tokens:
            had += self.call.seen_tokens[sequence.index]
        while len(live.tokens) < had and not live.ended.is_set():
            live.changed.clear()
            await live.changed.wait()
        await self._take(sequence, had)
        self._delta(sequence)

    def _delta(self, sequence: AnswerSequence, end: SequenceEnd | None = None) -> Delta:
        """With what was taken since the last one."""
        text, reasoning, tokens = sequence.said, sequence.reasoned, sequence.tokens
        sequence.said, sequence.reasoned, sequence.tokens = "", "", []
        if not self.call.include_reasoning:
            reasoning = ""
        calls: list[CallDelta] = []
        if sequence.tools is not None:
            # What a refusal ends may be continued.
            ended = end is not None and end.refusal is None
            text, calls = sequence.tools.push(text, ended)
            sequence.called |= any(call.whole is not None for call in calls)
        # The client has the tokens that it came with.
        until = sequence.taken - len(self.call.committed_token_ids)
        here = slice(until - len(tokens), until)
        logprobs = sequence.live.logprobs[here] if self.call.logprobs is not None else ()
        drafted = sequence.live.drafted[here] if self.call.speculative_decoding_stats else ()
        return Delta(sequence.index, text, tokens, reasoning, logprobs, calls, drafted, end)

    def _pause_s(self) -> float:
        """Between two deltas of one stream; grows with the streams that share the CPU."""
        config = self._config
        return max(config.coalesce_ms / 1000, self._router.unfinished / _CHUNKS_PER_S)

    async def _take(self, sequence: AnswerSequence, most: int | None = None) -> None:
        """Make text of what came since, of so many tokens in all `most`; a stop string cancels the
        request."""
        live = sequence.live
        while sequence.stop is None and (new := live.tokens[sequence.taken : most]):
            if len(new) <= _TEXT_INLINE_TOKENS:
                sequence.push(new)
            else:  # many hold up other calls
                await asyncio.to_thread(sequence.push, new)
            if sequence.stop is not None:
                self._router.cancel(live)

    async def _end(self, sequence: AnswerSequence) -> SequenceEnd:
        """How the sequence ended, with the rest of its text. Raises Refused."""
        live = sequence.live
        refusal = None
        if sequence.stop is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_USAGE_WAIT_S):
                    await live.ended.wait()
            finish = live.finish or Finish(live.pool_id, FinishReason.STOP, Usage())
            sequence.finish()
        else:
            finish = self._finish(live)
            at_fault = call_field(finish.field, self.call)
            refusal = refusal_of_finish(finish, self.call.request_id, at_fault)
            if refusal is None:
                # Else what is held back stays so: a continuation from these tokens gives it, whole.
                sequence.finish()
        now_s = time.monotonic()
        token = self._end_token(sequence, finish)
        asked_for = token in self.call.stop_token_ids
        return SequenceEnd(
            reason=FinishReason.STOP if sequence.stop is not None else finish.reason,
            prompt_tokens=len(live.request.prompt),
            completion_tokens=sequence.taken,
            usage=finish.usage,
            seed=self.seed(sequence.index),
            stop=sequence.stop,
            stop_token=token if asked_for else None,
            end_token=None if asked_for else token,
            reasoning_tokens=sequence.reasoning_tokens,
            message=finish.message,
            first_token_s=(live.first_s or now_s) - self._arrived_s,
            total_s=now_s - self._arrived_s,
            prompt_logprobs=live.prompt_logprobs,
            refusal=refusal,
        )

    def _end_token(self, sequence: AnswerSequence, finish: Finish) -> int | None:
        if sequence.stop is not None or finish.reason is not FinishReason.STOP:
            return None
        live = sequence.live
        return next(iter(set(live.tokens[-1:]) & set(live.request.stop_token_ids)), None)

    def _finish(self, live: InFlightRequest) -> Finish:
        """What the pool said of a request that has ended. Raises Refused where it served none."""
        if live.cut:
            raise Refused(Refusal(StatusCode.UNAVAILABLE, live.cut))
        if (reject := live.reject) is not None:
            name = call_field(reject.field, self.call)
            message = f"{name}: {reject.message}" if name else reject.message
            raise Refused(Refusal(CODES[reject.code], message, reject.retry_after_s, name))
        assert live.finish is not None
        return live.finish
