"""One replica on several devices: rank 0 is the replica, the other ranks do as it does.

`load_parallel` starts a process per further device and loads the target in all of them, each its
part (`models.weights`). Rank 0 is what the caller holds. It sends each batch to the others
(`parallel.rendezvous`), and all ranks run it together: they meet in the sums and joins of the
target's layers and in rank 0's drafts (`parallel.drafts`). Every rank sees the same logits, so
every rank commits the same tokens; what each of them committed is compared after every batch.

A rank that ends, fails alone or disagrees takes the replica with it: rank 0 raises ReplicaBroken
then and ever after, so that its process is replaced. A rank ends by itself when rank 0 has gone.
By default all ranks are processes of one machine; `start` may place them on others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from replicas.calibration import calibrated, probe
from replicas.config import ReplicaConfig
from replicas.decoding import load_grammars
from replicas.errors import PairRefused
from replicas.kv_cache import OutOfBlocks
from replicas.memory import MemoryPlan, check_memory, free_bytes, plan_memory
from replicas.models import resolve_device
from replicas.pair import load_pair, read_pair
from replicas.parallel.drafts import FollowingDrafter, LeadingDrafter
from replicas.parallel.ranks import FAILED_S, Failure, LocalRank, RankHandle, Ranks, ReplicaBroken
from replicas.parallel.rendezvous import (
    GROUP_TIMEOUT,
    LOOPBACK,
    Address,
    Channel,
    Store,
    host_store,
    join_store,
)
from replicas.replica import Replica
from scheduler.messages import Batch, ReplicaSpec, StepResult

StartRank = Callable[[ReplicaConfig, int, Address], RankHandle]
"""Starts a process, on any machine, that calls `follow` with these; returns without waiting."""

_COME_S = 300.0
"""What a rank's process may take to begin: it has to import torch, maybe with many others."""
_LOAD_S = 1800.0
"""What a rank may need longer than rank 0 to read its weights."""
_DONE_S = 60.0
"""Ranks end a batch together, but for what each does after the last sum."""
_IDLE_S = 3600.0
"""A rank asks again after this time without a message."""
_RESUME = "resume"
"""Rank 0 has failed with the same error as this rank: both go on."""

_T = TypeVar("_T")
_Committed = list[tuple[str, tuple[int, ...]]]
"""What a batch has committed, by row."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Start:
    """What a rank must know before it builds its replica."""

    plan: MemoryPlan
    drafter: tuple[str, tuple[int, ...]] | None
    """Its name and auxiliary layers."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Released:
    """Rows to release, and how far the drafter's caches hold each of them."""

    rows: dict[str, int | None]


class ParallelReplica:
    """Rank 0 and the others; to be used like a `Replica`, from one thread."""

    def __init__(self, replica: Replica, ranks: Ranks) -> None:
        self.replica = replica
        """Rank 0."""
        self._ranks = ranks
        self.spec: ReplicaSpec = replica.spec

    def step(self, batch: Batch, interrupted: Callable[[], bool] = lambda: False) -> StepResult:
        """Run one batch on all ranks. If it raises anything but ReplicaBroken, the residents are as
        they were before it."""

        def asked() -> bool:
            # The others must end the batch after the same step.
            answer = interrupted()
            self._ranks.tell(answer)
            return answer

        self._ranks.tell(batch)
        try:
            result = self.replica.step(batch, asked)
        except ReplicaBroken:
            raise
        except Exception as error:
            self._compare(Failure.of(error), FAILED_S)
            self._ranks.tell(_RESUME)
            raise
        self._compare(_committed(result), _DONE_S)
        return result

    def draft_ahead(self, batch: Batch) -> None:
        """Its drafter has no device of its own."""

    def release(self, sequence_ids: Iterable[str]) -> None:
        """As `Replica.release`; raises ReplicaBroken."""
        here, drafter = self.replica.residents, self.replica.drafter
        rows = {
            name: drafter.valid(name) if drafter is not None and name in here else None
            for name in sequence_ids
        }
        self._ranks.tell(_Released(rows))
        self.replica.release(rows)

    def probe(self) -> None:
        """As `Replica.probe`; raises ReplicaBroken."""
        with contextlib.suppress(OutOfBlocks):
            probe(self)

    @property
    def residents(self) -> tuple[str, ...]:
        return self.replica.residents

    @property
    def broken(self) -> Exception | None:
        return self._ranks.broken

    def close(self) -> None:
        self._ranks.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _compare(self, own: object, within_s: float) -> None:
        for rank, answer in enumerate(self._ranks.collect(_Committed, within_s), start=1):
            if answer != own:
                raise self._ranks.fail(f"rank {rank} answered {answer}, rank 0 {own}")


def load_replica(config: ReplicaConfig) -> Replica | ParallelReplica:
    """The replica that `config` describes, on one device or on several of this machine.

    Raises what `Replica.load` raises, whichever rank met it.
    """
    count = config.tensor_parallel
    if count == 1:
        return Replica.load(config)
    if resolve_device(config.device).type == "cuda" and torch.cuda.device_count() < count:
        raise PairRefused(
            f"tensor_parallel: needs {count} devices, this machine has {torch.cuda.device_count()}"
        )
    return load_parallel(config)


def load_parallel(
    config: ReplicaConfig, start: StartRank | None = None, host: str = LOOPBACK
) -> ParallelReplica:
    """Load the pair on `tensor_parallel` devices, one process each; this one is rank 0.

    `start` starts a further rank, by default as a process of this machine; all of them must reach
    `host`, which is here. Raises what `Replica.load` raises, whichever rank met it.
    """
    check_memory(config, read_pair(config).shape, resolve_device(config.device))
    store, address = host_store(host)
    handles: list[RankHandle] = []
    try:
        for rank in range(1, config.tensor_parallel):
            handles.append((start or start_here)(config, rank, address))
    except BaseException:
        for handle in handles:
            handle.leave(0.0)
        raise
    ranks = Ranks(store, handles)
    try:
        parallel = _lead(config, store, ranks)
        if config.calibrate:
            replica = parallel.replica
            parallel.spec = calibrated(parallel, *replica.planned, replica.aux_layers)
    except BaseException as error:
        for handle in handles:
            handle.kill()
        ranks.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if ranks.broken is not None and isinstance(error, RuntimeError):
            raise PairRefused(f"tensor_parallel: {ranks.broken}") from error
        raise
    return parallel


def _lead(config: ReplicaConfig, store: Store, ranks: Ranks) -> ParallelReplica:
    """Load rank 0, in step with the others."""
    config = _on_device(config, 0)
    device = torch.device(config.device)
    # A process group waits for minutes for a rank that never comes: it is formed when all are here.
    _loaded(ranks, bool, _COME_S)
    _form_group(config, 0, store)
    pair = load_pair(config)
    # The rank with the least room decides: all of them cut batches alike.
    share = config.gpu_memory_utilization or 1.0
    free = min(free_bytes(device, share), *_loaded(ranks, int, _LOAD_S))
    plan = plan_memory(config, pair.shape, device, loaded=True, free=free)
    drafter = pair.drafter(config, plan)
    leading = None if drafter is None else LeadingDrafter(drafter)
    ranks.tell(_Start(plan, None if leading is None else (leading.name, leading.aux_layers)))
    replica = Replica(pair, config, plan, leading)
    replica.grammars = load_grammars(config, replica.spec.embedding_size)
    return ParallelReplica(replica, ranks)


def follow(config: ReplicaConfig, rank: int, address: Address) -> None:
    """A further rank's life: load, then do what rank 0 says until it goes.

    Raises what loading raises, which rank 0 is told, and the error of a batch that failed here
    alone.
    """
    store = join_store(address)
    rank_0 = Channel(store.clone(), rank, of_rank_0=False)
    try:
        replica, drafter = load_rank(config, rank, store, rank_0)
    except Exception as error:
        with contextlib.suppress(dist.DistError):
            rank_0.send(Failure.of(error))
        raise
    with contextlib.suppress(dist.DistError):  # rank 0 has gone, or its machine
        _serve(replica, drafter, rank_0)


def load_rank(
    config: ReplicaConfig, rank: int, store: Store, rank_0: Channel
) -> tuple[Replica, FollowingDrafter | None]:
    """This rank's part of the target, and no drafter but rank 0's."""
    config = _on_device(config, rank)
    device = torch.device(config.device)
    rank_0.send(True)
    _form_group(config, rank, store)
    pair = load_pair(config, dataclasses.replace(read_pair(config), draft=None))
    rank_0.send(free_bytes(device, config.gpu_memory_utilization or 1.0))
    start: _Start = rank_0.receive(_Start, _LOAD_S)
    drafter = None if start.drafter is None else FollowingDrafter(*start.drafter)
    replica = Replica(pair, config, start.plan, drafter)
    replica.grammars = load_grammars(config, replica.spec.embedding_size)
    return replica, drafter


def _serve(replica: Replica, drafter: FollowingDrafter | None, rank_0: Channel) -> None:
    def interrupted() -> bool:
        answer: bool = rank_0.receive(bool, _IDLE_S)
        return answer

    while True:
        try:
            message = rank_0.receive(Batch | _Released | None, _IDLE_S)
        except TimeoutError:
            continue
        if message is None:
            return
        if isinstance(message, _Released):
            if drafter is not None:
                drafter.reach = message.rows
            replica.release(message.rows)
            if drafter is not None:
                drafter.reach = {}
            continue
        try:
            result = replica.step(message, interrupted)
        except Exception as error:
            rank_0.send(Failure.of(error))
            try:
                while rank_0.receive(str | bool, FAILED_S) != _RESUME:
                    pass  # rank 0 asks about steps that are not run here
            except TimeoutError:
                raise error from None
        else:
            rank_0.send(_committed(result))


def _on_device(config: ReplicaConfig, rank: int) -> ReplicaConfig:
    """The config with the device of this rank, which is made the current one."""
    device = resolve_device(config.device)
    if device.type == "cuda":
        # It may see the GPUs of all ranks, or its own only.
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return config.model_copy(update={"device": str(device)})


def _form_group(config: ReplicaConfig, rank: int, store: Store) -> None:
    dist.init_process_group(
        "nccl" if config.device.startswith("cuda") else "gloo",
        store=store,
        rank=rank,
        world_size=config.tensor_parallel,
        timeout=GROUP_TIMEOUT,
    )


def _loaded(ranks: Ranks, kind: type[_T], within_s: float) -> list[_T]:
    """The ranks' answers while they load; raises ReplicaBroken where one could not."""
    answers = ranks.collect(kind, within_s)
    for rank, answer in enumerate(answers, start=1):
        if isinstance(answer, Failure):
            raise ranks.fail(f"rank {rank} failed with {answer}")
    return answers


def start_here(config: ReplicaConfig, rank: int, address: Address) -> LocalRank:
    """Start a rank as a process of this machine; it ends with this one."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=follow, args=(config, rank, address), daemon=True)
    # `spawn` starts an interpreter that would import from the working directory first.
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        process.start()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before
    return LocalRank(process)


def _committed(result: StepResult) -> _Committed:
    return [(row.sequence_id, row.tokens) for row in result.rows]
