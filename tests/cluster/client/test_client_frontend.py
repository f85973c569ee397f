"""Proves: the frontend continues an answer behind every token, and with the client before it a
stream that breaks again and again reads like one that did not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest
from grpc import StatusCode

from cluster.client import AsyncClient
from cluster.frontend.target_text import TargetText
from cluster.frontend.text import TextStream
from protos import lockstep_pb2 as pb, lockstep_pb2_grpc
from replicas.replica import Replica
from tests.cluster.fakes import tokenizer
from tests.cluster.frontend.rig import PROMPT, PROMPT_IDS, Context, frontend, stream
from tests.cluster.frontend.test_openai_decoding import PAIR
from tests.cluster.scripted import ACTOR_DIED, QUICK, joined


@pytest.mark.parametrize("which", ["no stop", "a stop that comes", "a stop that only begins"])
async def test_the_frontend_continues_behind_every_token(which: str) -> None:
    """Text and tokens after each cut, the one before the first token and the one after the last."""
    async with frontend() as made:
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=40)
        text = (await made.Generate(request, Context())).text
        if which == "a stop that comes":
            request.stop.append(text[10:16])
        if which == "a stop that only begins":
            request.stop.extend([text[10:14] + "never", text[-3:] + "never"])
        whole = await made.Generate(request, Context())
        for cut in range(len(whole.token_ids) + 1):
            given = TextStream(tokenizer(), PROMPT_IDS, tuple(request.stop))
            before = given.push(whole.token_ids[:cut]).text
            again = pb.GenerateRequest()
            again.CopyFrom(request)
            again.committed_token_ids.extend(whole.token_ids[:cut])
            after, tokens = joined(await stream(made, again, Context()))
            assert before + after == whole.text
            assert tokens == list(whole.token_ids[cut:])


class BrokenFrontend(lockstep_pb2_grpc.LockstepServicer):
    """A real frontend whose streams break after so many chunks, or, below 0, so many ends."""

    def __init__(self, made: object, cuts: list[int]) -> None:
        self._made = made
        self._cuts = cuts
        self.fruitful = 0
        """Breaks of streams that had brought tokens."""

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateChunk]:
        cut = self._cuts.pop(0) if self._cuts else None
        async with aclosing(self._made.GenerateStream(request, context)) as chunks:  # type: ignore[attr-defined]
            number = tokens = ends = 0
            async for chunk in chunks:
                if cut in (number, -ends):
                    self.fruitful += tokens > 0
                    break
                number += 1
                ends += chunk.HasField("end")
                tokens += len(chunk.token_ids)
                yield chunk
            else:
                return
        await context.abort(StatusCode.INTERNAL, ACTOR_DIED)


@pytest.mark.parametrize(("temperature", "n"), [(0.0, 1), (1.0, 1), (1.0, 3)])
async def test_client_and_frontend_together_lose_and_repeat_nothing(
    temperature: float, n: int
) -> None:
    real = {"load": lambda: Replica.load(PAIR), "text": TargetText.load(PAIR)}
    async with frontend(step_s=0.002, **(real if n > 1 else {})) as made:
        server = grpc.aio.server()
        broken = BrokenFrontend(made, [0, 3, 1, 2, 0, 4, -2])
        lockstep_pb2_grpc.add_LockstepServicer_to_server(broken, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with AsyncClient(f"127.0.0.1:{port}", retry=QUICK) as client:
            request = pb.GenerateRequest(
                prompt=PROMPT,
                max_new_tokens=200,
                temperature=temperature,
                stop=["qqqq"],
                ignore_eos=True,
                request_id="mine",
                logprobs=0 if n > 1 else None,
                n=n,
            )
            chunks = [chunk async for chunk in client.stream(request)]
        if temperature:
            request.seed = chunks[0].seed
        whole = await made.Generate(request, Context())
        for index, answer in enumerate([whole, *whole.others]):
            own = [chunk for chunk in chunks if chunk.index == index]
            assert joined(own) == (answer.text, list(answer.token_ids))
            assert [said for chunk in own for said in chunk.logprobs] == list(answer.logprobs)
            ends = [chunk.end for chunk in own if chunk.HasField("end")]
            assert [end.usage.completion_tokens for end in ends] == [200]
        assert chunks[-1].end.recovered == broken.fruitful >= 2
        await server.stop(None)
