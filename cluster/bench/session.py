"""One benchmark from beginning to end: prompts, warm-up, load, report."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.bench.arrivals import Arrivals, Closed, Extent
from cluster.bench.figures import Record, summarise
from cluster.bench.load import Send, drive, grpc_request, over_grpc
from cluster.bench.openai_load import OpenAIServer
from cluster.bench.report import Report, machine
from cluster.bench.workload import BenchError, Workload, engine_request, synthetic_prompts
from cluster.client import AsyncClient
from cluster.config import ClusterConfig
from cluster.files import read_prompts
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

    @property
    def warming(self) -> tuple[Closed, Extent]:
        return Closed(min(self.warm_up, 8) or 1), Extent(requests=self.warm_up)


def run_on_engine(plan: Plan, config: ClusterConfig, note: Note) -> Report:
    """Load a replica here and drive it. Raises what loading raises, and BenchError."""
    import torch

    from cluster.bench import engine as driver
    from cluster.frontend.target_text import TargetText
    from cluster.local_engine import LocalEngine
    from replicas.replica import Replica

    replica = Replica.load(config.planned_replica)
    text = TargetText.load(config.replica)
    workload = plan.workload(replica.spec.vocab_size)
    engine = LocalEngine(replica, config.scheduler)

    def requests(asked: Workload) -> Callable[[int], Any]:
        return lambda n: engine_request(asked, n, text.encode, text.eos_token_ids)

    warming = _noting(note, "warm-up", plan.warm_up)
    driver.drive(engine, requests(_salted(workload)), *plan.warming, warming)
    noting = _noting(note, "load", plan.extent.requests)
    records = driver.drive(engine, requests(workload), plan.arrivals, plan.extent, noting)
    served_by = {
        "served by": "the engine of this process",
        **_served(config.replica.target, config.replica.drafting.method, replica.spec),
        "drafted by": config.replica.drafting.model,
        "rows of a batch": config.scheduler.rows_max,
        "torch threads": torch.get_num_threads(),
    }
    return report_of(plan, records, served_by)


async def run_on_cluster(plan: Plan, server: Any, note: Note) -> Report:
    """Drive the cluster at `server`, a `cluster.client.channel.Server`. Raises grpc.RpcError where
    it cannot be asked, and BenchError."""
    async with AsyncClient(server.address, server.api_key, server.tls) as client:
        replicas = list((await client.status()).replicas)
        workload = plan.workload(min((each.vocab_size for each in replicas), default=0))

        def sends(asked: Workload) -> Send:
            return over_grpc(client, lambda number: grpc_request(asked, number))

        await _warm_up(plan, sends(_salted(workload)), note)
        retries = client.retries
        records = await _load(plan, sends(workload), note)
        retries = client.retries - retries
    served_by = {"served by": f"the cluster at {server.address}", "replicas": len(replicas)}
    for first in replicas[:1]:
        served_by |= _served(first.target, first.drafter, first) | {"drafted by": first.draft}
    return report_of(plan, records, served_by, retries)


async def run_on_openai(
    plan: Plan, url: str, key: str | None, model: str | None, chat: bool, note: Note
) -> Report:
    """Drive a server of OpenAI's API. `model`: None is the first that it names; `chat`: it is asked
    for chat completions. Raises BenchError where it cannot be asked."""
    workload = plan.workload(0)
    async with OpenAIServer(url, key, model, chat) as server:
        await _warm_up(plan, server.sends(_salted(workload)), note)
        records = await _load(plan, server.sends(workload), note)
    served_by = {
        "served by": f"OpenAI's API at {url}",
        "target": server.model,
        "endpoint": "chat" if chat else "completions",
    }
    return report_of(plan, records, served_by)


async def _warm_up(plan: Plan, send: Send, note: Note) -> None:
    await drive(send, *plan.warming, _noting(note, "warm-up", plan.warm_up))


async def _load(plan: Plan, send: Send, note: Note) -> list[Record]:
    noting = _noting(note, "load", plan.extent.requests)
    return await drive(send, plan.arrivals, plan.extent, noting)


def _salted(workload: Workload) -> Workload:
    """For the warm-up, which must leave no prompt in a cache for the load to find."""
    return replace(workload, salt=f"{workload.salt} warm-up")


def _noting(note: Note, phase: str, total: int | None) -> Callable[[int], None]:
    return lambda ended: note(phase, ended, total)


def _served(target: str, drafter: str, replica: Any) -> dict[str, Any]:
    """`replica`: what it says of itself, here or by status."""
    own = {"device": replica.device, "dtype": replica.dtype}
    return {"target": target, "drafter": drafter or "none", **own}


def report_of(
    plan: Plan, records: list[Record], served_by: Mapping[str, Any], retries: int = 0
) -> Report:
    """What was asked for, and what came of it."""
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
            **served_by,
        },
        machine=machine(),
        summary=summarise(records, retries),
        records=tuple(records),
    )
