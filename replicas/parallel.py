"""One replica on several devices: rank 0 is the replica, the other ranks do as it does.

`load_parallel` starts a process per further device and loads the pair in all of them: the target
divided (`replicas.sharding`), the draft whole. Rank 0 is what the caller holds; it hands each order
to the others over a pipe and all of them run it, meeting in the sums and joins of the target's
layers. Every rank sees the same logits, so every rank commits the same tokens; what each of them
committed is compared after every order.

A rank that ends or disagrees takes the replica with it: rank 0 raises ReplicaBroken then and ever
after, so that its process is replaced. A rank whose caller has gone ends by itself. All ranks are
on one machine.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from replicas.calibration import calibrate
from replicas.config import ReplicaConfig
from replicas.memory import MemoryPlan, pair_shape, plan_memory
from replicas.pair import PairRefused, load_pair, read_pair, resolve_device
from replicas.replica import Replica
from replicas.sharding import NotDivisible, check_divisible
from scheduler.messages import Order, ReplicaSpec, StepResult

_COLLECTIVE_TIMEOUT = timedelta(minutes=5)
_LEAVE_S = 10.0


class ReplicaBroken(RuntimeError):
    """The ranks no longer agree, or one of them is gone: the process should be replaced."""


class ParallelReplica:
    """Rank 0 and the others; to be used like a `Replica`, from one thread."""

    def __init__(
        self, replica: Replica, others: list[Connection], processes: list[SpawnProcess], folder: Any
    ) -> None:
        self._replica = replica
        self._others = others
        self._processes = processes
        self._folder = folder
        self._broken: ReplicaBroken | None = None
        self.spec: ReplicaSpec = replica.spec

    def step(self, order: Order, interrupted: Callable[[], bool] = lambda: False) -> StepResult:
        """Run one order on all ranks. If it raises anything but ReplicaBroken, the residents are as
        they were before it."""

        def asked() -> bool:
            # The others must end the order after the same step.
            answer = interrupted()
            self._tell(answer)
            return answer

        self._tell(order)
        try:
            result = self._replica.step(order, asked)
        except Exception as error:
            self._compare(f"{type(error).__name__}")
            raise
        self._compare(_committed(result))
        return result

    def release(self, sequence_ids: Iterable[str]) -> None:
        ids = tuple(sequence_ids)
        self._tell(ids)
        self._replica.release(ids)

    @property
    def residents(self) -> tuple[str, ...]:
        return self._replica.residents

    def close(self) -> None:
        """End the other ranks."""
        for connection in self._others:
            connection.close()
        for process in self._processes:
            process.join(_LEAVE_S)
            if process.is_alive():
                process.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()

    def _tell(self, message: object) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            for connection in self._others:
                connection.send(message)
        except OSError as error:
            self._break(f"a rank is gone: {error}")

    def _compare(self, own: object) -> None:
        try:
            answers = [connection.recv() for connection in self._others]
        except (EOFError, OSError) as error:
            self._break(f"a rank is gone: {error}")
        for rank, answer in enumerate(answers, start=1):
            if answer != own:
                self._break(f"rank {rank} answered {answer!r}, rank 0 {own!r}")

    def _break(self, message: str) -> NoReturn:
        """Residents may differ from rank to rank from now on: nothing may run any more."""
        self._broken = ReplicaBroken(message)
        raise self._broken


def load_replica(config: ReplicaConfig) -> Replica | ParallelReplica:
    """The replica that `config` describes, on one device or on several."""
    return Replica.load(config) if config.tensor_parallel == 1 else load_parallel(config)


def load_parallel(config: ReplicaConfig) -> ParallelReplica:
    """Load the pair on `tensor_parallel` devices of this machine, one process each.

    Raises what `Replica.load` raises, whichever rank met it.
    """
    ranks = config.tensor_parallel
    files = read_pair(config)
    try:
        check_divisible(files.target_config, ranks)
    except NotDivisible as error:
        raise PairRefused(f"tensor_parallel: {error}") from None
    if resolve_device(config.device).type == "cuda" and torch.cuda.device_count() < ranks:
        raise PairRefused(
            f"tensor_parallel: {ranks} devices are asked for, {torch.cuda.device_count()} are here"
        )
    folder = tempfile.TemporaryDirectory(prefix="lockstep-ranks-")
    meeting = Path(folder.name, "meeting").as_uri()
    context = multiprocessing.get_context("spawn")
    others: list[Connection] = []
    processes: list[SpawnProcess] = []
    for rank in range(1, ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_follow, args=(config, rank, meeting, theirs), daemon=True)
        process.start()
        theirs.close()  # or its end would not be noticed
        others.append(ours)
        processes.append(process)
    try:
        replica = _load(config, 0, meeting, lambda plan: _least(plan, others))
    except BaseException:
        for process in processes:
            process.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
        folder.cleanup()
        raise
    parallel = ParallelReplica(replica, others, processes, folder)
    if config.calibrate:
        parallel.spec = dataclasses.replace(parallel.spec, timings=calibrate(parallel))
    return parallel


def _load(
    config: ReplicaConfig, rank: int, meeting: str, agree: Callable[[MemoryPlan], MemoryPlan]
) -> Replica:
    """This rank's replica, with the memory plan that all ranks agree on."""
    device = resolve_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=config.tensor_parallel,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    own = config.model_copy(update={"device": str(device)})
    pair = load_pair(own)
    return Replica(pair, own, agree(plan_memory(own, pair_shape(pair), pair.device, loaded=True)))


def _least(own: MemoryPlan, others: list[Connection]) -> MemoryPlan:
    """The plan of the rank with the least room, sent to all: sizes decide how orders are cut up."""
    plans = [own]
    for rank, connection in enumerate(others, start=1):
        try:
            answer = connection.recv()
        except EOFError:
            raise PairRefused(f"tensor_parallel: rank {rank} ended while loading") from None
        if isinstance(answer, str):
            raise PairRefused(f"tensor_parallel: rank {rank}: {answer}")
        plans.append(answer)
    least = min(plans, key=lambda plan: (plan.work.rows, plan.work.pass_tokens, plan.kv_blocks))
    blocks = min(plan.kv_blocks for plan in plans)
    least = dataclasses.replace(least, kv_blocks=blocks)
    for connection in others:
        connection.send(least)
    return least


def _follow(config: ReplicaConfig, rank: int, meeting: str, caller: Connection) -> None:
    """A further rank's process: load, then do what rank 0 says until it goes."""

    def agree(plan: MemoryPlan) -> MemoryPlan:
        caller.send(plan)
        agreed: MemoryPlan = caller.recv()
        return agreed

    try:
        try:
            replica = _load(config, rank, meeting, agree)
        except (ValueError, OSError, RuntimeError) as error:
            caller.send(f"{type(error).__name__}: {error}")
            raise
        while True:
            message = caller.recv()
            if not isinstance(message, Order):
                replica.release(message)
                continue
            try:
                answer: object = _committed(replica.step(message, caller.recv))
            except Exception as error:
                answer = type(error).__name__
            caller.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # rank 0 has gone


def _committed(result: StepResult) -> list[tuple[str, tuple[int, ...]]]:
    return [(row.sequence_id, row.tokens) for row in result.rows]
