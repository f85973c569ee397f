"""What a comparison is of: which models, and which of the prompts. Knows nothing of the load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cluster.bench.compare import Comparison, compare
from cluster.bench.transformers_runs import Transformers
from cluster.bench.workload import BenchError, Workload, engine_request
from cluster.config import ClusterConfig
from cluster.frontend.target_text import TargetText
from scheduler.config import SchedulerConfig
from scheduler.errors import InvalidRequest
from scheduler.messages import ReplicaSpec, Request
from scheduler.validation import check_request


def as_served(config: ClusterConfig, served: Any) -> ClusterConfig:
    """The settings with the models of a replica (a `pb.ReplicaStatus`) where none were given."""
    if served is None or not served.target:
        return config
    names = {"target": served.target, "draft": served.draft or None, "dtype": served.dtype}
    given = config.replica.model_fields_set
    missing = {name: value for name, value in names.items() if name not in given}
    return config.model_copy(update={"replica": config.replica.model_copy(update=missing)})


def check_comparable(config: ClusterConfig, served: Any, drawn: bool) -> None:
    """Raises BenchError, before the load, where the prompts will be `drawn` from a vocabulary that
    the models do not have, and what reading the models' settings raises."""
    from replicas.models.pair import read_pair

    files = read_pair(config.replica)
    if drawn and served and files.vocab_size < served.vocab_size:
        raise BenchError(
            f"prompt_tokens: they are drawn from the server's {served.vocab_size} tokens, and"
            f" {config.replica.target!r}, which is compared, has {files.vocab_size}"
        )


def that_fit(
    requests: list[Request], config: SchedulerConfig, spec: ReplicaSpec
) -> tuple[list[Request], str]:
    """Those that such a replica can serve, and a sentence on the others if there are any.

    Raises BenchError if it can serve none.
    """
    fit, why = [], ""
    for request in requests:
        try:
            check_request(request, config, spec)
        except InvalidRequest as error:
            why = why or str(error)
        else:
            fit.append(request)
    if not fit:
        raise BenchError(f"no prompt can be compared: {why}")
    left_out = len(requests) - len(fit)
    return fit, f"{left_out} of {len(requests)} prompts are not compared: {why}" if why else ""


def run(
    config: ClusterConfig,
    models: Transformers,
    replica: Any,
    workload: Workload,
    prompts: int,
    rounds: int,
    note: Callable[[str, int], None],
) -> Comparison:
    """On those of the first `prompts` that fit; `replica` None loads one."""
    from replicas.replica import Replica

    replica = replica or Replica.load(config.planned_replica)
    text = TargetText.load(config.replica)
    count = min(prompts, len(workload.prompts))
    asked = [engine_request(workload, n, text.encode, ()) for n in range(count)]
    fit, left_out = that_fit(asked, config.scheduler, replica.spec)
    found = compare(replica, config.scheduler, models, fit, rounds, workload.draft_len, note)
    return replace(found, left_out=left_out)
