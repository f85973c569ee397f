"""Random worlds: requests, replicas and faults, all drawn from one seed, and what must hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

from benchmarks.shared.linear import LinearCost, LinearTimes
from scheduler.batching import passes_bound
from scheduler.config import SchedulerConfig
from scheduler.messages import (
    Action,
    Emit,
    Event,
    FinishReason,
    Priority,
    Reject,
    RejectCode,
    ReplicaSpec,
    Request,
    Sampling,
    Submit,
)
from scheduler.simulation import FaultPlan, Report, World, reference_output

VOCAB_SIZE = 50
LONGEST_S = 600.0
"""Virtual time after which a world that still runs counts as stuck."""


@dataclass(frozen=True)
class Knobs:
    """The size and the kind of a world; the seed draws the rest."""

    requests: int = 30
    replicas: int = 2
    rows_max: int = 4
    batches_in_flight_max: int = 2
    wait_rounds: int = 4
    steps_per_batch_max: int = 4
    residents_max: int = 16
    waiting_requests_max: int = 4096
    faults: bool = True
    deaths: int = 2
    drains: int = 1
    cancels: int = 4
    deadly: int = 0
    """Requests that kill every replica that steps them."""
    kv_reserve: float = 0.5
    overlaps: bool | None = None
    """Whether the replicas draft a batch while they check another one; None: in some worlds."""
    windows: bool | None = None
    """Whether the replicas' models have layers with a window, beside some that keep all; None: some
    of them have."""


def draw(seed: int, number: int) -> tuple[int, Knobs]:
    """The seed and the knobs of world `number`: the same for ever, whatever ran before."""
    rng = Random(f"{seed}/{number}")
    knobs = Knobs(
        requests=rng.choice([1, 3, 10, 20, 30, 40, 80, 150]),
        replicas=rng.randint(1, 5),
        rows_max=rng.choice([1, 2, 3, 4, 8, 16]),
        batches_in_flight_max=rng.randint(1, 4),
        steps_per_batch_max=rng.choice([1, 2, 4, 8]),
        residents_max=rng.choice([1, 2, 5, 16, 64]),
        waiting_requests_max=rng.choice([3, 20, *[4096] * 6]),
        faults=rng.random() < 0.7,
        deaths=rng.choice([0, 0, 1, 2, 4, 8]),
        drains=rng.choice([0, 0, 1, 2, 4]),
        cancels=rng.choice([0, 0, 2, 6, 20]),
        deadly=rng.choice([0, 0, 0, 1, 2]),
        kv_reserve=rng.choice([0.0, 0.25, 0.5, 1.0]),
        wait_rounds=rng.choice([1, 2, 4, 4, 7]),
    )
    return rng.randrange(2**32), knobs


class Watcher:
    """Looks at the books after every event."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.rows_peak: Counter[str] = Counter()
        self.rows_max: dict[str, int] = {}
        """The fewest rows that batches of a replica were limited to."""
        self.next_index: dict[str, int] = {}
        self.passes_most = 0

    def __call__(self, now_s: float, event: Event, actions: list[Action]) -> None:
        assert self.world is not None
        scheduler = self.world.scheduler
        scheduler.check_integrity()
        if isinstance(event, Submit):
            self.next_index[event.request.id] = len(event.request.committed)
        for action in actions:
            if isinstance(action, Emit):
                assert action.tokens, "an empty Emit"
                assert action.start == self.next_index[action.request_id], "tokens misnumbered"
                self.next_index[action.request_id] += len(action.tokens)
        pool = scheduler.pool
        for replica in pool.replicas.values():
            limit = replica.rows_max(scheduler.config.rows_max)
            limit = self.rows_max[replica.id] = min(self.rows_max.get(replica.id, limit), limit)
            rows = len(replica.ready) + replica.stepping
            self.rows_peak[replica.id] = max(self.rows_peak[replica.id], rows)
            oldest = next(iter(replica.ready), None)
            if oldest is None:
                continue
            passes = replica.ready.times_passed_over(oldest)
            self.passes_most = max(self.passes_most, passes)
            peak, rounds = self.rows_peak[replica.id], scheduler.config.wait_rounds
            bound = passes_bound(peak, limit, rounds, replica.spec.overlaps)
            assert passes <= bound, f"{oldest.id} was passed over {passes} times, bound {bound}"


def random_request(rng: Random, name: str) -> Request:
    length = rng.choice([1, 3, 8, 20, 60])
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))
    if rng.random() < 0.4:
        prompt = (*range(rng.choice([5, 30, 45])), *prompt)[:60]
    request = Request(
        id=name,
        prompt=prompt,
        max_new_tokens=rng.choice([1, 2, 5, 17, 40]),
        sampling=Sampling(seed=rng.choice([0, 7])),
        # Often a token of the prompt, which must end nothing.
        stop_token_ids=rng.choice([(), (prompt[0],), (prompt[-1], 3)]),
        draft_len=rng.choice([None, None, 0, 1, 6]),
        timeout_s=rng.choice([None, None, None, 0.05, 2.0]),
        priority=rng.choice(list(Priority)),
        tenant=rng.choice(["", "x", "y"]),
    )
    if rng.random() < 0.15:
        tokens, _ = reference_output(request, VOCAB_SIZE)
        carried = tokens[: rng.randint(0, len(tokens))]
        request = replace(request, committed=carried)
    return request


def build(seed: int, knobs: Knobs) -> tuple[World, list[Request]]:
    rng = Random(seed)
    deadly = frozenset(f"q{index}" for index in range(knobs.deadly))
    faults = FaultPlan(deadly=deadly, lease_s=0.2)
    if knobs.faults:
        faults = FaultPlan(
            delay_s=(0.0001, rng.choice([0.001, 0.03])),
            duplicate=rng.choice([0.0, 0.3]),
            lose=rng.choice([0.0, 0.02]),
            late=rng.choice([0.0, 0.02]),
            fail=rng.choice([0.0, 0.05]),
            rows_max=rng.choice([None, None, 2]),
            deadly=deadly,
            lease_s=0.2,
            rejoin_s=rng.choice([0.0, 0.3]),
        )
    config = SchedulerConfig(
        rows_max=knobs.rows_max,
        draft_len=rng.choice([None, None, 0, 1, 4, 8]),
        steps_per_batch_max=knobs.steps_per_batch_max,
        batches_in_flight_max=knobs.batches_in_flight_max,
        wait_rounds=knobs.wait_rounds,
        prefill_rows_max=rng.choice([1, 4, 8]),
        prefill_tokens_max=rng.choice([1, 5, 16, 64, 2048]),
        residents_max=knobs.residents_max,
        waiting_requests_max=knobs.waiting_requests_max,
        waiting_tokens_max=rng.choice([300, 4_194_304, 4_194_304]),
        priority_age_s=rng.choice([0.0, 0.1, 30.0]),
        kv_reserve=knobs.kv_reserve,
    )
    watcher = Watcher()
    acceptance = rng.choice([0.0, 0.7, 1.0])
    of_drafts = Random(f"{seed} drafts")
    overlaps = of_drafts.random() < 0.4 if knobs.overlaps is None else knobs.overlaps
    times = LinearTimes(
        draft=LinearCost(of_drafts.choice([0.0005, 0.002, 0.02]) if overlaps else 0.0),
        verify=LinearCost(0.004, 2e-5, rng.choice([0.0, 1e-5, 1e-4])),
        prefill=LinearCost(0.002, 5e-6),
    )
    world = World(rng, times, config, faults=faults, watch=watcher)
    watcher.world = world
    names = [f"r{index}" for index in range(knobs.replicas)]
    of_models = Random(f"{seed} models")
    for name in names:
        kv_blocks = rng.choice([30, 60, 1000])
        spec = ReplicaSpec(
            kv_blocks=kv_blocks,
            block_size=4,
            context_len=128,
            vocab_size=VOCAB_SIZE,
            rows_max={30: 1, 60: 3}.get(kv_blocks) if knobs.faults else None,
            prefix_sharing=rng.random() < 0.7,
            overlaps=overlaps,
        )
        if knobs.windows or (knobs.windows is None and of_models.random() < 0.4):
            spec = replace(spec, kv_groups=((1, None), (1, of_models.randint(1, 4))))
        world.join(rng.choice([0.0, 0.0, 0.1]), name, spec)
    requests = [random_request(rng, f"q{index}") for index in range(knobs.requests)]
    span_s = rng.choice([0.0, 0.3])
    for request in requests:
        world.submit(rng.random() * span_s, request, acceptance)
    for _ in range(knobs.cancels):
        world.cancel(rng.random() * 0.5, rng.choice(requests).id)
    for _ in range(knobs.deaths):
        world.kill(rng.random(), rng.choice(names))
    for _ in range(knobs.drains):
        world.drain(rng.random() * 0.5, rng.choice(names), leave_s=0.3)
    return world, requests


def _gentle(faults: FaultPlan, knobs: Knobs) -> bool:
    """Whether no request can be hit by chance so often that it counts as guilty."""
    by_chance = faults.lose or faults.late or faults.fail
    return not by_chance and knobs.deaths + knobs.deadly <= 2


def check(world: World, requests: list[Request], report: Report, knobs: Knobs) -> None:
    """Every request ended exactly once, with the reference output, and left nothing."""
    assert report.ended_s < LONGEST_S, "the world is stuck"
    config = world.scheduler.config
    dangers = knobs.faults or knobs.deaths or knobs.deadly
    for request in requests:
        outcome = report.outcomes[request.id]
        assert outcome.ends == 1, f"{request.id} ended {outcome.ends} times"
        tokens, reason = reference_output(request, VOCAB_SIZE)
        received = request.committed + tuple(outcome.tokens)
        finish = outcome.end
        if isinstance(finish, Reject):
            assert finish.code is RejectCode.OVERLOADED
            assert min(config.waiting_requests_max, config.waiting_tokens_max) <= 300, "no limit"
            assert not outcome.tokens
            continue
        assert finish is not None
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (received, finish.reason) == (tokens, reason), request.id
        else:
            assert received == tokens[: len(received)], request.id
            assert len(received) < len(tokens), f"{request.id} was complete"
            causes = {"cancelled": knobs.cancels, "deadline": request.timeout_s, "failed": dangers}
            assert causes[finish.reason], f"{request.id}: {finish.reason} without a cause"
        assert finish.usage.completion_tokens == len(received), request.id
        assert finish.usage.prompt_tokens == len(request.prompt), request.id
        if finish.reason is FinishReason.FAILED and _gentle(world.faults, knobs):
            assert request.id in world.faults.deadly, f"{request.id} failed and is innocent"
    deadly = len(world.faults.deadly)
    assert report.killed <= 3 * deadly, f"{deadly} deadly requests killed {report.killed}"
    status = world.scheduler.snapshot()
    assert (status.waiting, status.live) == (0, 0)
    assert all(replica.kv_blocks_used == 0 for replica in status.replicas)
    assert all(replica.batches_in_flight == 0 for replica in status.replicas)
    assert world.residents == 0, "a replica still holds KV"
