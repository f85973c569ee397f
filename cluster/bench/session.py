"""One benchmark from beginning to end: prompts, warm-up, load, comparison, report.

The cluster is driven from this process; the comparison runs in this process too, after the load,
and wants the machine to itself: a cluster on the same machine should be idle then. A run gives the
report of its load before the comparison begins, and once more with the comparison: whatever becomes
of that, what the load has found is there.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.bench import compare
from cluster.bench.arrivals import Arrivals, Closed, Extent
from cluster.bench.figures import PoolSums, Record, summarise
from cluster.bench.report import Report, machine
from cluster.bench.transformers_runs import Transformers
from cluster.bench.workload import BenchError, Workload, engine_request, prompts_of
from cluster.config import ClusterConfig
from cluster.frontend.target_text import TargetText
from replicas.config import ReplicaConfig
from replicas.models.load import dtype_name
from replicas.models.names import TINY
from scheduler.config import DRAFT_LEN_MAX
from scheduler.messages import SamplingParams

Note = Callable[[str, int, int | None], None]
"""Called with a phase, how much of it is done, and how much there is if that is known."""

NOT_FINISHED = "it has not come to its end"
"""Of the comparison, in the report that is made before it."""


def _tiny_encoder() -> Any:
    return TargetText.load(ReplicaConfig(target=TINY)).encoder


@dataclass(frozen=True)
class Plan:
    """What was asked for on the command line."""

    arrivals: Arrivals
    extent: Extent
    warm_up: int
    """Requests before the load that do not count, closed loop."""
    prompts: Path | None
    prompt_tokens: str | None
    """Lengths of random prompts, as `parse_lengths` reads them."""
    limit: int
    """Distinct prompts at most."""
    seed: int
    max_new_tokens: int
    sampling: SamplingParams
    ignore_eos: bool
    draft_len: int | None
    compare: bool
    rounds: int
    compare_prompts: int
    model: str | None = None
    """Of a server of OpenAI's API; None is the first that it names."""
    chat: bool = False
    """Whether such a server is asked for chat completions."""

    def workload(self, target: str, vocab_size: int) -> Workload:
        """Raises BenchError, PromptsError and OSError."""
        if self.prompts is None and self.prompt_tokens is None and target != TINY:
            raise BenchError(
                f"prompts: give --prompts or --prompt-tokens; without them held-out text of the"
                f" tiny pair is used, and the target is {target!r}"
            )
        if self.prompt_tokens is not None and vocab_size < 1:
            raise BenchError("prompt_tokens: the server has no replica that tells its vocabulary")
        prompts, described = prompts_of(
            self.limit, self.prompts, self.prompt_tokens, vocab_size, _tiny_encoder, self.seed
        )
        return Workload(
            prompts=prompts,
            described=described,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            ignore_eos=self.ignore_eos,
            draft_len=self.draft_len,
            salt=secrets.token_hex(8),
        )

    @property
    def warming(self) -> tuple[Closed, Extent]:
        return Closed(min(self.warm_up, 8) or 1), Extent(requests=self.warm_up)


@dataclass(frozen=True)
class Load:
    """What a load has left behind."""

    workload: Workload
    records: list[Record]
    before: PoolSums
    after: PoolSums | None
    retries: int
    served_by: dict[str, Any]
    unanswered: str = ""
    """Why the server gave no status at the end."""


def run_on_engine(plan: Plan, config: ClusterConfig, note: Note) -> Iterator[Report]:
    """Load a replica here and drive it. Raises what loading raises, and BenchError, all before the
    first report."""
    from cluster.bench import engine as driver
    from cluster.local_engine import LocalEngine
    from replicas.replica import Replica

    config = _drafting(plan, config)
    # Before the replica takes its share of the memory that is left.
    models = Transformers.load(config.replica) if plan.compare else None
    replica = Replica.load(config.planned_replica)
    text = TargetText.load(config.replica)
    workload = plan.workload(config.replica.target, replica.spec.vocab_size)
    engine = LocalEngine(replica, config.scheduler)
    drafting = config.replica.drafting

    def requests(asked: Workload, prefix: str) -> Callable[[int], Any]:
        return lambda n: engine_request(asked, n, text.encode, text.eos_token_ids, prefix)

    warming = _noting(note, "warm-up", plan.warm_up)
    driver.drive(engine, requests(_salted(workload), "warm-up "), *plan.warming, warming)
    before = driver.pool_sums(engine)
    noting = _noting(note, "load", plan.extent.requests)
    records = driver.drive(engine, requests(workload, ""), plan.arrivals, plan.extent, noting)
    load = Load(
        workload,
        records,
        before,
        driver.pool_sums(engine),
        0,
        {
            "served by": "the engine of this process",
            "target": config.replica.target,
            "drafter": _drafter(drafting.method, drafting.model),
            "device": replica.spec.device,
            "dtype": replica.spec.dtype,
            "rows of a batch": config.scheduler.rows_max,
            "replicas": 1,
        },
    )
    yield from reports_of(plan, config, load, models, replica, note)


def run_on_cluster(plan: Plan, config: ClusterConfig, server: Any, note: Note) -> Iterator[Report]:
    """Drive the cluster at `server`, a `cluster.client.channel.Server`. The comparison is of the
    models that it serves, but for what `config` was given explicitly. Raises grpc.RpcError where
    the server cannot be asked, BenchError, and what reading the settings of the compared models
    raises, all before the first report."""
    load, config = asyncio.run(_through_cluster(plan, config, server, note))
    yield from reports_of(plan, config, load, None, None, note)


async def _through_cluster(
    plan: Plan, config: ClusterConfig, server: Any, note: Note
) -> tuple[Load, ClusterConfig]:
    """What the load left behind, and the settings of the comparison."""
    from cluster.bench import load as driver
    from cluster.client import AsyncClient

    async with AsyncClient(server.address, server.api_key, server.tls) as client:
        status = await client.status()
        replicas = list(status.replicas)
        first = replicas[0] if replicas else None
        if plan.compare:
            config = _drafting(plan, compare.as_served(config, first))
            compare.check_comparable(config, first, drawn=plan.prompt_tokens is not None)
        workload = plan.workload(
            first.target if first else "", min((r.vocab_size for r in replicas), default=0)
        )
        driver.check_requests(workload)

        def sends(asked: Workload) -> driver.Send:
            return driver.over_grpc(client, lambda number: driver.grpc_request(asked, number))

        warming = _noting(note, "warm-up", plan.warm_up)
        await driver.drive(sends(_salted(workload)), *plan.warming, warming)
        before = driver.pool_sums(await client.status())
        retries = client.retries
        noting = _noting(note, "load", plan.extent.requests)
        records = await driver.drive(sends(workload), plan.arrivals, plan.extent, noting)
        retries = client.retries - retries
        closing, unanswered = await driver.closing_status(client)
        load = Load(
            workload,
            records,
            before,
            None if closing is None else driver.pool_sums(closing),
            retries,
            {
                "served by": f"the cluster at {server.address}",
                "target": first.target if first else None,
                "drafter": _drafter(first.drafter, first.draft) if first else None,
                "device": first.device if first else None,
                "dtype": first.dtype if first else None,
                "rows of a batch": "as the server is set",
                "replicas": None if closing is None else len(closing.replicas),
            },
            unanswered,
        )
        return load, config


def run_on_openai(plan: Plan, urls: Sequence[str], key: str | None, note: Note) -> Iterator[Report]:
    """Drive one server of OpenAI's API after the other. The report is the first one's; with
    several it has the figures of all. Raises BenchError where one cannot be asked."""
    loads = [asyncio.run(_through_openai(plan, url, key, note)) for url in urls]
    first, *_ = reports = [report_of(plan, load) for load in loads]
    if len(urls) > 1:
        servers = {url: each.summary for url, each in zip(urls, reports, strict=True)}
        whose = f"all figures but those of the table of servers are of {urls[0]} alone"
        first = replace(first, servers=servers, notes=(*first.notes, whose))
    yield first


async def _through_openai(plan: Plan, url: str, key: str | None, note: Note) -> Load:
    from cluster.bench.load import drive
    from cluster.bench.openai_load import OpenAIServer

    async with OpenAIServer(url, key, plan.model, plan.chat) as server:
        workload = plan.workload(server.model, 0)
        warm = server.sends(_salted(workload))
        await drive(warm, *plan.warming, _noting(note, f"{url}: warm-up", plan.warm_up))
        noting = _noting(note, f"{url}: load", plan.extent.requests)
        records = await drive(server.sends(workload), plan.arrivals, plan.extent, noting)
    served_by = {
        "served by": f"OpenAI's API at {url}",
        "target": server.model,
        "endpoint": "chat" if plan.chat else "completions",
    }
    nothing = PoolSums(0, 0, 0, 0)
    return Load(workload, records, nothing, None, 0, served_by, "OpenAI's API has none")


def _drafting(plan: Plan, config: ClusterConfig) -> ClusterConfig:
    """An engine that drafts as many tokens as the requests ask for."""
    if plan.draft_len is None or plan.draft_len <= config.scheduler.draft_len_max:
        return config
    if plan.draft_len > DRAFT_LEN_MAX:
        raise BenchError(f"draft_len: must be at most {DRAFT_LEN_MAX}, is {plan.draft_len}")
    scheduler = config.scheduler.model_copy(update={"draft_len_max": plan.draft_len})
    return config.model_copy(update={"scheduler": scheduler})


def reports_of(
    plan: Plan,
    config: ClusterConfig,
    load: Load,
    models: Transformers | None,
    replica: Any,
    note: Note,
) -> Iterator[Report]:
    """The load's, then once more with the comparison, if one was asked for, or why there is none.

    `models` and `replica` are loaded where they are None.
    """
    report = report_of(plan, load)
    if not plan.compare:
        yield report
        return
    pair, drafting = config.replica, config.replica.drafting
    drafter = _drafter(drafting.method, drafting.model)
    of = f"{pair.target}, drafter {drafter}, {dtype_name(pair)} on {pair.device}"
    report = replace(
        report, settings={**report.settings, "compared": of}, not_compared=NOT_FINISHED
    )
    yield report
    try:
        comparison = compare.compare_config(
            config,
            models or Transformers.load(config.replica),
            replica,
            load.workload,
            plan.compare_prompts,
            plan.rounds,
            lambda phase, done: note(f"comparison: {phase}", done, None),
        )
    except Exception as error:
        # Memory, a package, a defect: none of them may cost what the load has found.
        yield replace(report, not_compared=f"{type(error).__name__}: {error}")
        return
    yield replace(report, comparison=comparison, not_compared="")


def _salted(workload: Workload) -> Workload:
    """For the warm-up, which must leave no prompt in a cache for the load to find."""
    return replace(workload, salt=f"{workload.salt} warm-up")


def _noting(note: Note, phase: str, total: int | None) -> Callable[[int], None]:
    return lambda ended: note(phase, ended, total)


def _drafter(method: str, model: str | None) -> str:
    return " ".join(filter(None, (method or "none", model)))


def _missing(load: Load) -> tuple[str, ...]:
    """What the figures are without, in a sentence."""
    if load.after is None:
        return (f"no spread, no padding: the server gave no status at the end ({load.unanswered})",)
    if not load.before.goes_on_in(load.after):
        return ("no spread, no padding: the pool was replaced or a replica left during the run",)
    return ()


def report_of(plan: Plan, load: Load) -> Report:
    """Of the load alone."""
    import torch

    sampling = plan.sampling
    return Report(
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        settings={
            "prompts": f"{len(load.workload.prompts)}, {load.workload.described}",
            "arrivals": str(plan.arrivals),
            "requests": plan.extent.requests,
            "duration_s": plan.extent.duration_s,
            "warm-up requests": plan.warm_up,
            "new tokens": plan.max_new_tokens,
            "end of text": "ignored" if plan.ignore_eos else "ends a request",
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": plan.seed,
            # The server may draft fewer: what was drafted is among the figures.
            "draft tokens per step": "chosen"
            if plan.draft_len is None
            else f"{plan.draft_len} asked for",
            **load.served_by,
            "torch threads of this process": torch.get_num_threads(),
        },
        machine=machine(),
        summary=summarise(load.records, load.before, load.after, load.retries),
        records=tuple(load.records),
        notes=_missing(load),
    )
