"""One replica on several devices: rank 0 is the replica, the other ranks do as it does.

`load_parallel` starts a process per further device and loads the pair in all of them: the target
divided (`models.sharding`), the draft whole. Rank 0 is what the caller holds; it hands each batch
to the others (`parallel.meeting`) and all of them run it, meeting in the sums and joins of the
target's layers. Every rank sees the same logits, so every rank commits the same tokens; what each
of them committed is compared after every batch.

A rank that ends, fails alone or disagrees takes the replica with it: rank 0 raises ReplicaBroken
then and ever after, so that its process is replaced. A rank whose caller has gone ends by itself.
By default all ranks are processes of one machine; who has several starts them himself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import torch
import torch.distributed as dist

from replicas.calibration import calibrated
from replicas.config import ReplicaConfig
from replicas.memory import MemoryPlan, check_memory, pair_shape, plan_memory
from replicas.models.pair import PairRefused, load_pair, read_pair, resolve_device
from replicas.parallel.meeting import LOOPBACK, Address, Meeting, NobodyCame, Store, call, store_of
from replicas.parallel.ranks import DONE_S, FAILED_S, Failure, RankHandle, Ranks, ReplicaBroken
from replicas.replica import Replica
from scheduler.messages import Batch, ReplicaSpec, StepResult

StartRank = Callable[[ReplicaConfig, int, Address], RankHandle]
"""Starts a process, on any machine, that calls `follow` with these; returns without waiting."""

_COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""Ranks read weights at their own pace before they first meet. For those that fail see `ranks`."""
_COME_S = 300.0
"""What a rank's process may take to begin: it has to import torch, maybe with many others."""


class ParallelReplica:
    """Rank 0 and the others; to be used like a `Replica`, from one thread."""

    def __init__(self, replica: Replica, ranks: Ranks) -> None:
        self._replica = replica
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

        self._ranks.begin()
        self._ranks.tell(batch)
        try:
            result = self._replica.step(batch, asked)
        except ReplicaBroken:
            raise
        except Exception as error:
            self._compare(Failure.of(error))
            raise
        self._compare(_committed(result))
        return result

    def release(self, sequence_ids: Iterable[str]) -> None:
        ids = tuple(sequence_ids)
        self._ranks.tell(ids)
        self._replica.release(ids)

    @property
    def residents(self) -> tuple[str, ...]:
        return self._replica.residents

    @property
    def broken(self) -> Exception | None:
        return self._ranks.broken

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _compare(self, own: object) -> None:
        answers = self._ranks.collect(FAILED_S if isinstance(own, Failure) else DONE_S)
        for rank, answer in enumerate(answers, start=1):
            if answer != own:
                self._ranks.fail(f"rank {rank} answered {answer!r}, rank 0 {own!r}")


def load_replica(config: ReplicaConfig) -> Replica | ParallelReplica:
    """The replica that `config` describes, on one device or on several of this machine.

    Raises what `Replica.load` raises, whichever rank met it.
    """
    count = config.tensor_parallel
    if count == 1:
        return Replica.load(config)
    if resolve_device(config.device).type == "cuda" and torch.cuda.device_count() < count:
        raise PairRefused(
            f"tensor_parallel: {count} devices are asked for, {torch.cuda.device_count()} are here"
        )
    return load_parallel(config)


def load_parallel(
    config: ReplicaConfig, start: StartRank | None = None, host: str = LOOPBACK
) -> ParallelReplica:
    """Load the pair on `tensor_parallel` devices, one process each; this one is rank 0.

    `start` starts a further rank, by default as a process of this machine; all of them must reach
    `host`, which is here. Raises what `Replica.load` raises, whichever rank met it.
    """
    count = config.tensor_parallel
    check_memory(config, read_pair(config), resolve_device(config.device))
    processes: list[RankHandle] = []
    meeting = Meeting(host, _COLLECTIVE_TIMEOUT)
    try:
        for rank in range(1, count):
            processes.append((start or start_here)(config, rank, meeting.address))
        connections = meeting.gather(count, _COME_S, lambda missing: _lost(processes, missing))
    except BaseException as error:
        # Those that have begun meet nobody.
        for process in processes:
            process.kill()
            process.leave(0.0)
        meeting.close()
        if isinstance(error, NobodyCame):
            raise PairRefused(f"tensor_parallel: {error}") from None
        raise
    ranks = Ranks(connections, processes)
    try:
        replica = _load(
            config, 0, meeting.store, lambda gpu: _all_here(gpu, ranks), lambda p: _least(p, ranks)
        )
        parallel = ParallelReplica(replica, ranks)
        if ranks.broken is not None:
            raise ranks.broken
        if config.calibrate:
            parallel.spec = calibrated(parallel, *replica.planned)
    except BaseException as error:
        for process in processes:
            process.kill()
        ranks.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if ranks.broken is not None and isinstance(error, RuntimeError):
            raise PairRefused(f"tensor_parallel: {ranks.broken}") from error
        raise
    finally:
        meeting.close()
    return parallel


def _load(
    config: ReplicaConfig,
    rank: int,
    store: Store,
    arrive: Callable[[str], None],
    agree: Callable[[MemoryPlan], MemoryPlan],
) -> Replica:
    """This rank's replica, with the memory plan that all ranks agree on."""
    device = resolve_device(config.device)
    if device.type == "cuda":
        # It may see the GPUs of all ranks, or its own only.
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    arrive(_gpu_of(device))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=config.tensor_parallel,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    own = config.model_copy(update={"device": str(device)})
    pair = load_pair(own)
    return Replica(pair, own, agree(plan_memory(own, pair_shape(pair), pair.device, loaded=True)))


def _gpu_of(device: torch.device) -> str:
    """Which one it is, of all machines; empty for a CPU, which ranks may share."""
    if device.type != "cuda":
        return ""
    known = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()} {getattr(known, 'uuid', device.index)}"


def _all_here(own: str, ranks: Ranks) -> None:
    """All ranks are there, on a GPU each, before any of them begins to wait for the others: nothing
    ends the wait for one that never comes."""
    taken = {own: 0}
    for rank, gpu in enumerate(_loaded(ranks), start=1):
        assert isinstance(gpu, str)
        if gpu and gpu in taken:
            ranks.fail(f"ranks {taken[gpu]} and {rank} have the same GPU")
        taken[gpu] = rank
    ranks.begin()


def _loaded(ranks: Ranks) -> list[object]:
    """The ranks' answers while they load; raises ReplicaBroken where one could not."""
    answers = ranks.collect()
    for rank, answer in enumerate(answers, start=1):
        if isinstance(answer, Failure):
            ranks.fail(f"rank {rank} failed with {answer.kind}: {answer.message}")
    return answers


def _least(own: MemoryPlan, ranks: Ranks) -> MemoryPlan:
    """The plan of the rank with the least room, sent to all: they decide how batches are cut."""
    plans = [own]
    for answer in _loaded(ranks):
        assert isinstance(answer, MemoryPlan)
        plans.append(answer)
    least = min(plans, key=lambda plan: (plan.work.rows, plan.work.pass_tokens, plan.kv_blocks))
    blocks = min(plan.kv_blocks for plan in plans)
    least = dataclasses.replace(least, kv_blocks=blocks)
    ranks.tell(least)
    return least


class _LocalRank:
    """A rank as a process of this machine."""

    def __init__(self, process: SpawnProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def ended(self) -> str | None:
        code = self._process.exitcode
        return None if code is None else f"exit code {code}"

    def kill(self) -> None:
        self._process.kill()

    def leave(self, within_s: float) -> None:
        self._process.join(within_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def start_here(config: ReplicaConfig, rank: int, address: Address) -> RankHandle:
    """Start a rank as a process of this machine; it ends with this one."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=follow, args=(config, rank, address), daemon=True)
    process.start()
    return _LocalRank(process)


def _lost(processes: Sequence[RankHandle], missing: Sequence[int]) -> str | None:
    """Which of those that are missing has ended, and how. Who came says himself why he ends."""
    for rank in missing:
        if (how := processes[rank - 1].ended()) is not None:
            return f"rank {rank} has ended before it came: {how}"
    return None


def follow(config: ReplicaConfig, rank: int, address: Address) -> None:
    """A further rank's life: call rank 0, load, then do what it says until it goes.

    Raises what loading raises, which rank 0 is told.
    """
    with call(address, rank) as caller:
        _follow(config, rank, store_of(address, _COLLECTIVE_TIMEOUT), caller)


def _follow(config: ReplicaConfig, rank: int, store: Store, caller: Connection) -> None:
    def agree(plan: MemoryPlan) -> MemoryPlan:
        caller.send(plan)
        agreed: MemoryPlan = caller.recv()
        return agreed

    try:
        replica = _load(config, rank, store, caller.send, agree)
    except Exception as error:  # whatever it is, nobody else can say it
        with contextlib.suppress(OSError):
            caller.send(Failure.of(error))
        raise
    try:
        while True:
            message = caller.recv()
            if not isinstance(message, Batch):
                replica.release(message)
                continue
            try:
                answer: object = _committed(replica.step(message, caller.recv))
            except Exception as error:
                answer = Failure.of(error)
            caller.send(answer)
    except (EOFError, OSError):
        pass  # rank 0 has gone, or its machine


def _committed(result: StepResult) -> list[tuple[str, tuple[int, ...]]]:
    return [(row.sequence_id, row.tokens) for row in result.rows]
