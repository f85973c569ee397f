"""The same prompts through several ways to generate, round by round, and which outputs agree.

Machines are shared and their speed drifts, so the ways take turns and every ratio is one of the
same round; the median of the rounds is reported with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

from cluster.bench.transformers_runs import ASSISTANCES, Assistance, DoesNotRun, Transformers
from cluster.bench.workload import BenchError, Workload, engine_request
from cluster.config import ClusterConfig
from cluster.local_engine import LocalEngine, Runner
from replicas.config import ReplicaConfig
from scheduler.config import SchedulerConfig
from scheduler.errors import InvalidRequest
from scheduler.messages import ReplicaSpec, Request
from scheduler.validation import check_request

Way = Callable[[Sequence[Request]], list[list[int]]]
"""New tokens of each request, in the requests' order. May raise DoesNotRun."""
Note = Callable[[str, int], None]
"""Called with the way that runs next and how many runs are done."""

REFERENCE = "transformers generate, batch 1"
TRIAL_PROMPTS, TRIAL_TOKENS = 2, 64
"""What settings of assisted generation are tried on."""


@dataclass(frozen=True)
class Contender:
    """One way to generate, over all rounds."""

    name: str
    prompts: int
    tokens_per_s: tuple[float, ...]
    """One per round."""
    identical: int
    """Prompts whose output was the reference's in every round."""
    does_not_run: str = ""
    """Why there are no figures."""

    @property
    def speed(self) -> float:
        """Median of the rounds, tokens/s."""
        return median(self.tokens_per_s)


@dataclass(frozen=True)
class Ratio:
    """One contender's speed over another's, round by round."""

    name: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True)
class Comparison:
    """What `--compare` found."""

    prompts: int
    new_tokens: int
    """Per prompt; every way generates exactly so many."""
    rounds: int
    assistance: str
    """How assisted generation drafted: the fastest of those tried."""
    contenders: tuple[Contender, ...]
    ratios: tuple[Ratio, ...]
    left_out: str = ""
    """Which of the prompts are not compared, and why; a sentence."""

    def said(self) -> str:
        """What was compared, in sentences."""
        parts = [
            f"{self.prompts} prompts, {self.new_tokens} new tokens each, greedy, all in one"
            " process, in turns. Identical: to transformers' generate at batch 1, in every round."
        ]
        if self.assistance:
            parts.append(f"Assisted generation at its fastest setting: {self.assistance}.")
        if self.left_out:
            parts.append(f"{self.left_out}.")
        return " ".join(parts)


def take_turns(
    ways: Mapping[str, Way],
    requests: Sequence[Request],
    rounds: int,
    expected: Sequence[Sequence[int]],
    counts: Mapping[str, int] | None = None,
    note: Note = lambda name, done: None,
    clock: Callable[[], float] = perf_counter,
) -> tuple[Contender, ...]:
    """Run every way once per round and compare its outputs with the `expected` ones.

    `counts`: ways that get only so many of the requests, from the first. A way that raises
    DoesNotRun is left out of later rounds. Each run gets its own cache salt: what an earlier one
    has put into a prefix cache would let Lockstep alone skip the prompts.
    """
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    asked = {name: requests[: (counts or {}).get(name, len(requests))] for name in ways}
    same = {name: [True] * len(asked[name]) for name in ways}
    broken: dict[str, str] = {}
    done = 0
    for number in range(rounds):
        for name, way in ways.items():
            if name in broken:
                continue
            note(name, done)
            salted = [replace(each, cache_salt=f"{name}, round {number}") for each in asked[name]]
            begun_s = clock()
            try:
                outputs = way(salted)
            except DoesNotRun as error:
                broken[name] = str(error)
                continue
            speeds[name].append(sum(map(len, outputs)) / (clock() - begun_s))
            assert len(outputs) == len(salted), f"{name}: outputs are missing"
            for index, (got, wanted) in enumerate(zip(outputs, expected, strict=False)):
                same[name][index] &= list(got) == list(wanted)
            done += 1
    return tuple(
        Contender(
            name,
            len(asked[name]),
            () if name in broken else tuple(speeds[name]),
            0 if name in broken else sum(same[name]),
            broken.get(name, ""),
        )
        for name in ways
    )


def ratio(contenders: Sequence[Contender], above: str, below: str) -> Ratio | None:
    """Round by round; None where either has no figures."""
    speeds = {each.name: each.tokens_per_s for each in contenders}
    over, under = speeds.get(above, ()), speeds.get(below, ())
    if not over or not under:
        return None
    values = tuple(a / b for a, b in zip(over, under, strict=True))
    return Ratio(f"{above} over {below}", values)


def fastest_assistance(
    models: Transformers,
    requests: Sequence[Request],
    candidates: Sequence[Assistance] = ASSISTANCES,
    clock: Callable[[], float] = perf_counter,
) -> Assistance:
    """The setting of assisted generation that is fastest on a few of these requests."""
    few = [
        replace(request, max_new_tokens=min(request.max_new_tokens, TRIAL_TOKENS))
        for request in requests[:TRIAL_PROMPTS]
    ]

    def seconds(how: Assistance) -> float:
        begun_s = clock()
        models.assisted(few, how)
        return clock() - begun_s

    models.assisted(few[:1], candidates[0])  # warm-up
    # The better of two runs each, in turn: a pause of the machine must not decide.
    turns = [[seconds(how) for how in candidates] for _ in range(2)]
    best = [min(times) for times in zip(*turns, strict=True)]
    return candidates[best.index(min(best))]


def lockstep_way(runner: Runner, config: SchedulerConfig, draft_len: int | None) -> Way:
    """All requests in one pool at once; `draft_len` is every request's, 0 turns drafting off."""

    def run(requests: Sequence[Request]) -> list[list[int]]:
        engine = LocalEngine(runner, config)
        asked = [replace(request, draft_len=draft_len) for request in requests]
        return [output.tokens for output in engine.generate(asked)]

    return run


def compare(
    runner: Runner,
    config: SchedulerConfig,
    models: Transformers,
    requests: Sequence[Request],
    rounds: int,
    draft_len: int | None = None,
    note: Note = lambda name, done: None,
) -> Comparison:
    """Lockstep at the config's batch size and at batch 1, with and without drafting, against
    transformers' `generate`, assisted generation and continuous batching. Greedy."""
    batch = config.rows_max
    alone = config.model_copy(update={"rows_max": 1})
    ours, ours_alone = f"Lockstep, batch {batch}", "Lockstep, batch 1"
    plain, plain_alone = f"Lockstep, k = 0, batch {batch}", "Lockstep, k = 0, batch 1"
    batched = f"transformers generate, batch {batch}"
    assisted = "transformers assisted, batch 1"
    continuous = f"transformers continuous batching, batch {batch}"
    ways: dict[str, Way] = {
        ours: lockstep_way(runner, config, draft_len),
        plain: lockstep_way(runner, config, 0),
        batched: lambda asked: models.batched(asked, batch),
        continuous: lambda asked: models.continuous(asked, batch),
        ours_alone: lockstep_way(runner, alone, draft_len),
        plain_alone: lockstep_way(runner, alone, 0),
        REFERENCE: lambda asked: models.batched(asked, 1),
    }
    how = ""
    if models.has_draft:
        note("transformers assisted, choosing its setting", 0)
        best = fastest_assistance(models, requests)
        how = str(best)
        ways[assisted] = lambda asked: models.assisted(asked, best)
    for name, way in ways.items():
        if name != continuous:  # it starts its own threads and cache each time, and counts so
            note(f"{name}, warm-up", 0)
            way(requests[:2])
    note("the reference", 0)
    expected = models.batched(requests, 1)
    contenders = take_turns(ways, requests, rounds, expected, note=note)
    pairs = [
        (ours, plain),
        (ours, batched),
        (ours, continuous),
        (ours_alone, plain_alone),
        (ours_alone, REFERENCE),
        (ours_alone, assisted),
        (ours, ours_alone),
    ]
    # At batch size 1 some pairs are the same.
    ratios = [ratio(contenders, *pair) for pair in dict.fromkeys(pairs) if pair[0] != pair[1]]
    return Comparison(
        prompts=len(requests),
        new_tokens=max(request.max_new_tokens for request in requests),
        rounds=rounds,
        assistance=how,
        contenders=contenders,
        ratios=tuple(each for each in ratios if each is not None),
    )


# --------------------------------------------------------------------------- models, prompts


def as_served(config: ClusterConfig, served: Any) -> ClusterConfig:
    """The settings with the models of a replica (a `pb.ReplicaStatus`) where none were given."""
    if served is None or not served.target:
        return config
    given = config.replica.model_dump(exclude_unset=True)
    names: dict[str, Any] = {"target": served.target, "dtype": served.dtype}
    if not {"draft", "speculative"} & given.keys():
        # A warning may follow the method.
        method = served.drafter.partition(",")[0] or "none"
        names["speculative"] = {"method": method, "model": served.draft or None}
    replica = ReplicaConfig.model_validate(names | given)
    return config.model_copy(update={"replica": replica})


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


def compare_config(
    config: ClusterConfig,
    models: Transformers,
    replica: Any,
    workload: Workload,
    prompts: int,
    rounds: int,
    note: Callable[[str, int], None],
) -> Comparison:
    """On those of the first `prompts` that fit; `replica` None loads one."""
    from cluster.frontend.target_text import TargetText
    from replicas.replica import Replica

    replica = replica or Replica.load(config.planned_replica)
    text = TargetText.load(config.replica)
    count = min(prompts, len(workload.prompts))
    asked = [engine_request(workload, n, text.encode, ()) for n in range(count)]
    fit, left_out = that_fit(asked, config.scheduler, replica.spec)
    found = compare(replica, config.scheduler, models, fit, rounds, workload.draft_len, note)
    return replace(found, left_out=left_out)
