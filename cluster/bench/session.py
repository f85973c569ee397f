"""One benchmark from beginning to end: prompts, warm-up, load, report."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from cluster.bench.arrivals import Arrivals, Closed, Extent, Send, drive
from cluster.bench.figures import Record, summarise
from cluster.bench.load import grpc_request, over_grpc
from cluster.bench.openai_load import OpenAIServer
from cluster.bench.report import Report, machine
from cluster.bench.workload import BenchError, Workload, engine_request, synthetic_prompts
from cluster.client import AsyncClient
from cluster.config import ClusterConfig
from cluster.prompt_files import read_prompts
from scheduler.simulation import parse_lengths

Note = Callable[[str, int, int | None], None]
"""Called with a phase, how much of it is done, and how much there is if that is known."""


@dataclass(frozen=True)
class Plan:
    """What was asked for on the command line."""

    arrivals: Arrivals
    extent: Extent
    warm_up: int
    """Requests before the load that do not count, closed loop."""
    prompts: Path | None
    prompt_tokens: str
    """Without a file: lengths of random prompts, as `parse_lengths` reads them."""
    limit: int
    """Distinct prompts at most."""
    seed: int
    options: Mapping[str, Any]
    """Of every request, by the names of a GenerateRequest."""

    def workload(self, vocab_size: int) -> Workload:
        """Raises BenchError, PromptsError and OSError."""
        prompts: tuple[Any, ...]
        if self.prompts is not None:
            prompts = tuple(read_prompts(self.prompts, self.limit))
        elif vocab_size < 1:
            raise BenchError("prompt_tokens: the server tells no vocabulary; give --prompts")
        else:
            lengths = parse_lengths(self.prompt_tokens)
            prompts = synthetic_prompts(self.limit, lengths, vocab_size, self.seed)
        return Workload(prompts, self.options, self.seed, secrets.token_hex(8))


@dataclass(frozen=True)
class Service:
    """What is measured."""

    sends: Callable[[Workload], Send]
    vocab_size: int
    """0 where it is not known."""
    said: Mapping[str, Any]
    """What it says of itself, for the report."""
    retries: Callable[[], int] = lambda: 0
    """Calls that were asked again so far."""


def engine(config: ClusterConfig, note: Note) -> AbstractAsyncContextManager[Service]:
    """A replica that is loaded by this call. Raises what loading raises."""
    import torch

    from cluster.bench.engine import over_engine
    from cluster.frontend.target_text import TargetText
    from cluster.local.engine import LocalEngine
    from cluster.worker.loading import tell_of_weights
    from replicas.replica import Replica

    tell_of_weights(lambda done, total: note("weights", done, total))
    replica = Replica.load(config.planned_replica)
    text = TargetText.load(config.replica)
    local = LocalEngine(replica, config.scheduler)

    def sends(workload: Workload) -> Send:
        ask = partial(engine_request, workload, encode=text.encode, eos=text.eos_token_ids)
        return over_engine(local, ask)

    said = {
        "served by": "the engine of this process",
        **_served(config.replica.target, config.replica.drafting.method, replica.spec),
        "drafted by": config.replica.drafting.model,
        "rows of a batch": config.scheduler.rows_max,
        "torch threads": torch.get_num_threads(),
    }
    return nullcontext(Service(sends, replica.spec.vocab_size, said))


@asynccontextmanager
async def cluster(server: Any) -> AsyncIterator[Service]:
    """The cluster at `server`, a `cluster.client.channel.Server`. Raises grpc.RpcError where it
    cannot be asked."""
    async with AsyncClient(server.address, server.api_key, server.tls) as client:
        replicas = list((await client.status()).replicas)
        said = {"served by": f"the cluster at {server.address}", "replicas": len(replicas)}
        for first in replicas[:1]:
            said |= _served(first.target, first.drafter, first) | {"drafted by": first.draft}
        yield Service(
            lambda workload: over_grpc(client, partial(grpc_request, workload)),
            min((each.vocab_size for each in replicas), default=0),
            said,
            lambda: client.retries,
        )


@asynccontextmanager
async def openai(
    url: str, key: str | None, model: str | None, chat: bool
) -> AsyncIterator[Service]:
    """A server of OpenAI's API. `model`: None is the first that it names; `chat`: it is asked for
    chat completions. Raises Unanswered where it cannot be asked."""
    async with OpenAIServer(url, key, model, chat) as server:
        said = {
            "served by": f"OpenAI's API at {url}",
            "target": server.model,
            "endpoint": "chat" if chat else "completions",
        }
        yield Service(server.sends, 0, said)


async def measure(plan: Plan, service: AbstractAsyncContextManager[Service], note: Note) -> Report:
    """The warm-up and the load. Raises what the service raises, and BenchError."""
    async with service as served:
        workload = plan.workload(served.vocab_size)
        # The warm-up leaves no prompt in a cache for the load to find.
        warming = replace(workload, salt=f"{workload.salt} warm-up")
        await drive(
            served.sends(warming),
            Closed(min(plan.warm_up, 8) or 1),
            Extent(requests=plan.warm_up),
            lambda ended: note("warm-up", ended, plan.warm_up),
        )
        retries = served.retries()
        records = await drive(
            served.sends(workload),
            plan.arrivals,
            plan.extent,
            lambda ended: note("load", ended, plan.extent.requests),
        )
        return _report(plan, records, served.said, served.retries() - retries)


def _served(target: str, drafter: str, replica: Any) -> dict[str, Any]:
    """`replica`: what it says of itself, here or by status."""
    own = {"device": replica.device, "dtype": replica.dtype}
    return {"target": target, "drafter": drafter or "none", **own}


def _report(plan: Plan, records: list[Record], said: Mapping[str, Any], retries: int) -> Report:
    random_tokens = f"random tokens, {plan.prompt_tokens} per prompt"
    return Report(
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        settings={
            "prompts": plan.prompts.name if plan.prompts is not None else random_tokens,
            "distinct prompts at most": plan.limit,
            "arrivals": str(plan.arrivals),
            "requests": plan.extent.requests,
            "duration_s": plan.extent.duration_s,
            "warm-up requests": plan.warm_up,
            **plan.options,
            "seed": plan.seed,
            **said,
        },
        machine=machine(),
        summary=summarise(records, retries),
        records=tuple(records),
    )
