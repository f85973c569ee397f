"""The one core behind every protocol: admits a call, tokenizes it and hands it to the pool.

An edge parses a message into a `GenerateCall`, opens it here and translates the deltas of the
`Answer`. Knows no Ray and no protocol.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from grpc import StatusCode

from cluster.config import ClusterConfig
from cluster.frontend.admission.control import AdmissionControl, Admitted, Caller
from cluster.frontend.answer import Answer
from cluster.frontend.answer_formats import AnswerFormats
from cluster.frontend.bounded_work import BoundedWork
from cluster.frontend.calls import GenerateCall, call_field, check_call, check_number
from cluster.frontend.pool_session import Audit, ShardRouter
from cluster.frontend.prompts import ChatPrompt, Prompt
from cluster.frontend.requests import RequestFactory
from cluster.frontend.status_codes import Refusal, Refused, refusal_of_error
from cluster.frontend.target_text import TargetText
from cluster.frontend.text import TextStream
from cluster.metrics import FrontendMeter
from cluster.metrics.exposition import exposition
from cluster.metrics.tracing import Tracer
from cluster.pool.protocol import STOPPING, PoolOverview, PoolPort, PoolView
from scheduler.errors import InvalidRequest, LockstepError, Overloaded
from scheduler.messages import Request

_TOKENIZE_INLINE = 8192
"""A prompt of more bytes, or tokens, is made tokens on a thread, off the event loop."""
_TURNS_MAX = 64
"""Calls for tokens alone at once; each holds its text while it waits."""
_LOOK_S = 1.0
"""How often is asked why there is no replica."""
LEAVES = "this frontend is replaced before the answer has ended; continue it, or ask again"
_T = TypeVar("_T")
log = logging.getLogger("lockstep.frontend")


@dataclass(frozen=True, slots=True)
class TokenizerTurn:
    """Work for one call that asks for tokens alone."""

    threads: ThreadPoolExecutor
    admitted: Admitted

    async def run(self, work: Callable[..., _T], *args: Any) -> _T:
        """Off the event loop, one call after the other; prompts have threads of their own."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)


class FrontendService:
    """All calls of one frontend process. Call `start` on an event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        pools: Sequence[PoolPort],
        text: TargetText,
        name: str,
        meter: FrontendMeter | None = None,
        bounded: BoundedWork | None = None,
        why_no_replica: Callable[[], Awaitable[tuple[str, bool]]] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`pools`: one per shard. `bounded`: processes that services share, and that their owner
        starts and closes; without it this one has its own. `why_no_replica`: why none can start,
        empty if nothing is wrong, and whether that is for good."""
        self.config = config
        self.text = text
        self.bounded = bounded or BoundedWork(text, config.frontend)
        self._owns_bounded = bounded is None
        self.formats = AnswerFormats(text, config.frontend)
        self._factory = RequestFactory(text, config)
        self._meter = meter or FrontendMeter()
        self.router = ShardRouter(pools, config, name, self._meter)
        self._tracer = tracer or Tracer(config.trace, config.model_name)
        self.audit = Audit(config.audit, self.router, self._meter)
        self.admission = AdmissionControl(config.auth, config.frontend)
        # Each holds up all else of this process for a tenth of a second when it has a long text.
        self._tokenizers = ThreadPoolExecutor(2, "tokenizer")
        self._token_calls = ThreadPoolExecutor(1, "token_calls")
        self._turns = 0
        self._why_no_replica = why_no_replica
        self._watching: asyncio.Task[None] | None = None
        self.unable = ""
        """Why no replica can start; empty: one serves or is expected."""
        self._left = ""
        """Why this frontend takes no call any more."""
        self.writing = asyncio.Lock()
        """Held while a part of a long answer is made."""

    def start(self) -> None:
        # Later all streams would stand still for the second that it takes.
        _ = self.text.grammars
        if self._owns_bounded:
            self.bounded.start()
        self.router.start()
        if self._why_no_replica is not None:
            self._watching = asyncio.get_running_loop().create_task(self._watch_replicas())
        self.audit.start()

    def check(self) -> None:
        """Raises RuntimeError when the loops between frontend and pool have died."""
        self.router.check()
        self.audit.check()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self.audit.close()
        await self.router.close()
        await asyncio.to_thread(self._tracer.close)
        if self._owns_bounded:
            self.bounded.close()
        for threads in (self._tokenizers, self._token_calls):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def stopping(self) -> asyncio.Event:
        """Set while the server admits no new request."""
        return self.router.stopping

    def ready(self) -> bool:
        """Whether a replica has its models in memory, as far as is known here."""
        return self.router.ready

    async def leave(self, grace_s: float) -> None:
        """This frontend is to go: calls may end within the grace time, and the rest ends then as
        unavailable, so that clients go on at another frontend."""
        log.info("this frontend goes; %d requests run, for %g s", self.router.unfinished, grace_s)
        await asyncio.sleep(grace_s)
        self._left = LEAVES
        if cut := self.router.unfinished:
            log.warning("%d requests end unfinished: %s", cut, LEAVES)
        self.router.cut_off(LEAVES)

    async def _watch_replicas(self) -> None:
        """While no replica serves, know why, and end what waits where none will come."""
        assert self._why_no_replica is not None
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self.router.lacks_replicas:
                self.unable = ""
                continue
            try:
                unable, for_good = await self._why_no_replica()
            except Exception as error:
                log.warning("Serve does not say how replicas are: %s", error)
                continue
            if unable != self.unable:
                log.warning("%s", unable or "replicas are expected again")
            self.unable = unable if self.router.lacks_replicas else ""
            if self.unable and for_good:
                self.router.cut_off(unable)

    def check_able(self) -> None:
        """Raises Refused where no call can be served here."""
        if why := self._left or self.unable:
            raise Refused(Refusal(StatusCode.UNAVAILABLE, why))

    async def status(self) -> PoolView:
        """What the pool is doing. Raises Refused."""
        with self.refusals():
            return await self.router.status()

    async def metrics(self, caller: Caller) -> bytes:
        """What all frontends and pools have counted, as a page for Prometheus. Raises Refused."""
        with self.refusals():
            self.admission.check_operator(caller)
            shards = (await self.router.overviews()).items()
            counted = {shard: seen.sums for shard, seen in shards}
            return exposition(counted, self.config.model_name)

    async def overviews(self, caller: Caller) -> dict[int, PoolOverview]:
        """What the shards are doing, by their numbers. Raises Refused."""
        with self.refusals():
            self.admission.check_operator(caller)
            return await self.router.overviews()

    def check_caller(self, caller: Caller) -> None:
        """To be called before a request is parsed: its errors tell of it. Raises Refused."""
        with self.refusals():
            self.admission.check(caller)

    @asynccontextmanager
    async def open(self, call: GenerateCall) -> AsyncIterator[Answer]:
        """Admit a call and hand it to the pool. Raises Refused.

        On leaving, sequences that have not ended are cancelled.
        """
        arrived_s = time.monotonic()
        with self.refusals(call):
            check_number(call, self.config)
            admitted = self.admission.admit(
                call.caller, call.sequences, call.number_field, call.priority
            )
        with admitted:
            with self.refusals(call):
                answer = await self._submit(call, admitted, arrived_s)
            try:
                yield answer
            except Refused as refused:
                answer.status = refused.refusal.code
                raise
            finally:
                record = answer.close()
                admitted.used = record.prompt_tokens + record.new_tokens
                self._tracer.record(record)
                for sequence in answer.sequences:
                    live = sequence.live
                    self.audit.offer(live, call.request_id or live.pool_id)

    @contextmanager
    def refusals(self, call: GenerateCall | None = None) -> Iterator[None]:
        """Errors become refusals that name the call's fields, and are counted. Raises Refused."""
        try:
            yield
        except Refused as refused:
            self._meter.refused(refused.refusal.code)
            raise
        except LockstepError as error:
            if isinstance(error, InvalidRequest) and call is not None:
                error = type(error)(call_field(error.field, call), error.reason)
            refusal = refusal_of_error(error)
            self._meter.refused(refusal.code)
            raise Refused(refusal) from None

    async def _submit(self, call: GenerateCall, admitted: Admitted, arrived_s: float) -> Answer:
        """All checks of all sequences come before any token is decoded or any request sent."""
        if self.stopping.is_set():
            raise Refused(Refusal(StatusCode.UNAVAILABLE, STOPPING))
        self.check_able()
        formats = self.formats.of(call)
        if call.tools is not None and formats.tools is not None:
            structure = formats.tool_structure(call.tools, call.structure)
            call = replace(call, structure=structure)
        check_call(call, self.config, self.text.context_len)
        if call.drawn_seed is None:
            call = replace(call, drawn_seed=self._factory.drawn_seed())
        call = replace(call, priority=admitted.priority)
        self._check_load(call.sequences)
        opened, first = None, None
        if formats.reasoning is not None:
            first = await self.tokens(call.prompts[0], admitted.tenant)
            opened = formats.opened(first)
            structure = formats.behind_reasoning(opened, call)
            call = replace(call, structure=structure)
        grammar = ""
        if call.structure is not None:
            grammar = await self.bounded.grammar(
                call.structure, call.committed_token_ids, admitted.tenant
            )
        requests: list[Request] = []
        for number, prompt in enumerate(call.prompts):
            tokens = first or await self.tokens(prompt, admitted.tenant)
            tokens = self._factory.truncated(call, tokens)
            length_max = self.router.length_max
            requests += self._factory.requests(
                call, number, tokens, grammar, admitted.tenant, length_max
            )
            self._factory.check_logprobs(requests)
        # Others came while tokens were made; from here on none can.
        self._check_load(call.sequences)
        admitted.charge(sum(request.length_expected for request in requests))
        answer = Answer(call, arrived_s, self.router, self._meter, self.config)
        try:
            for request in requests:
                rules = call.text_rules(request.stop_token_ids, formats.shown)
                text = TextStream(self.text.tokenizer, request.prompt, rules)
                answer.submit(request, text, *formats.readers(opened, call))
        except BaseException:
            answer.cancel()
            raise
        return answer

    def _check_load(self, sequences: int) -> None:
        """Raises Overloaded where so many more are too many."""
        unfinished = self.router.unfinished
        if unfinished + sequences > self.config.frontend.requests_max:
            raise Overloaded(f"{unfinished} requests are in flight already")

    async def tokens(self, prompt: Prompt, tenant: str = "") -> tuple[int, ...]:
        """Those of a prompt; of a long one made off the event loop. Raises what `encoding` and its
        call raise."""
        encode, size = await self.encoding(prompt, tenant)
        if size <= _TOKENIZE_INLINE:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, encode)

    async def encoding(
        self, prompt: Prompt, tenant: str
    ) -> tuple[Callable[[], tuple[int, ...]], int]:
        """What makes the tokens of a prompt, and of how many bytes, or tokens. It raises
        InvalidRequest; for a conversation this raises what `BoundedWork` does."""
        if isinstance(prompt, ChatPrompt):
            if prompt.ids is not None:
                return partial(tuple, prompt.ids), len(prompt.ids)
            if prompt.template is not None and not self.config.frontend.request_templates:
                raise InvalidRequest("chat_template", "not allowed: frontend.request_templates")
            rendered = await self.bounded.rendered(prompt, tenant)
            encode = partial(self.text.encode_rendered, rendered, prompt.special_tokens)
            return encode, len(rendered)
        return partial(self.text.tokens, prompt), prompt.size

    @asynccontextmanager
    async def tokenizing(self, caller: Caller) -> AsyncIterator[TokenizerTurn]:
        """A call for tokens alone: a request in flight as any other. Raises Refused."""
        with self.refusals(), self.admission.admit(caller) as admitted:
            if self._turns >= _TURNS_MAX:
                raise Overloaded(f"{self._turns} calls wait for the tokenizer already")
            self._turns += 1
            try:
                yield TokenizerTurn(self._token_calls, admitted)
            finally:
                self._turns -= 1
