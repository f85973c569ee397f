"""Proves: with a real frontend behind the client a stream that breaks again and again reads like
one that did not. That a frontend continues behind every token is in `frontend/test_ends.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest
from grpc import StatusCode

from cluster.client import AsyncClient
from protos import lockstep_pb2 as pb, lockstep_pb2_grpc
from tests.cluster.frontend.rig import PROMPT, Context, frontend
from tests.cluster.scripted import ACTOR_DIED, QUICK, joined


class BrokenFrontend(lockstep_pb2_grpc.LockstepServicer):
    """A real frontend whose streams break after so many chunks."""

    def __init__(self, made: object, cuts: list[int]) -> None:
        self._made = made
        self._cuts = cuts
        self.fruitful = 0
        """Breaks of streams that had brought tokens."""

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateChunk]:
        cut = self._cuts.pop(0) if self._cuts else -1
        async with aclosing(self._made.GenerateStream(request, context)) as chunks:  # type: ignore[attr-defined]
            number = tokens = 0
            async for chunk in chunks:
                if number == cut:
                    self.fruitful += tokens > 0
                    break
                number += 1
                tokens += len(chunk.token_ids)
                yield chunk
            else:
                return
        await context.abort(StatusCode.INTERNAL, ACTOR_DIED)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_client_and_frontend_together_lose_and_repeat_nothing(temperature: float) -> None:
    async with frontend(step_s=0.002) as made:
        server = grpc.aio.server()
        broken = BrokenFrontend(made, [0, 3, 1, 2, 0, 4])
        lockstep_pb2_grpc.add_LockstepServicer_to_server(broken, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with AsyncClient(f"127.0.0.1:{port}", retry=QUICK) as client:
            request = pb.GenerateRequest(
                prompt=PROMPT,
                max_new_tokens=200,
                temperature=temperature,
                stop=["qqqq"],
                request_id="mine",
            )
            chunks = [chunk async for chunk in client.stream(request)]
        if temperature:
            request.seed = chunks[0].seed
        whole = await made.Generate(request, Context())
        assert joined(chunks) == (whole.text, list(whole.token_ids))
        end = chunks[-1].end
        assert end.recovered == broken.fruitful >= 2
        assert end.usage.completion_tokens == 200
        await server.stop(None)
