"""One replica on several devices: rank 0 is the replica, the other ranks do as it does.

`load_parallel` starts a process per further device and loads the pair in all of them: the target
divided (`replicas.sharding`), the draft whole. Rank 0 is what the caller holds; it hands each order
to the others over a pipe and all of them run it, meeting in the sums and joins of the target's
layers. Every rank sees the same logits, so every rank commits the same tokens; what each of them
committed is compared after every order.

A rank that ends, fails alone or disagrees takes the replica with it: rank 0 raises ReplicaBroken
then and ever after, so that its process is replaced. A rank whose caller has gone ends by itself.
All ranks are on one machine.
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
from typing import Any

import torch
import torch.distributed as dist

from replicas.calibration import calibrate
from replicas.config import ReplicaConfig
from replicas.memory import MemoryPlan, pair_shape, plan_memory
from replicas.pair import PairRefused, load_pair, read_pair, resolve_device
from replicas.ranks import DONE_S, FAILED_S, Failure, Ranks, ReplicaBroken
from replicas.replica import Replica
from replicas.sharding import NotDivisible, check_divisible
from scheduler.messages import Order, ReplicaSpec, StepResult

_COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""Ranks read weights at their own pace before they first meet. For those that fail see `ranks`."""
_HERE = "here"


class ParallelReplica:
    """Rank 0 and the others; to be used like a `Replica`, from one thread."""

    def __init__(self, replica: Replica, ranks: Ranks, folder: Any) -> None:
        self._replica = replica
        self._ranks = ranks
        self._folder = folder
        self.spec: ReplicaSpec = replica.spec

    def step(self, order: Order, interrupted: Callable[[], bool] = lambda: False) -> StepResult:
        """Run one order on all ranks. If it raises anything but ReplicaBroken, the residents are as
        they were before it."""

        def asked() -> bool:
            # The others must end the order after the same step.
            answer = interrupted()
            self._ranks.tell(answer)
            return answer

        self._ranks.begin()
        self._ranks.tell(order)
        try:
            result = self._replica.step(order, asked)
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

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()

    def _compare(self, own: object) -> None:
        answers = self._ranks.collect(FAILED_S if isinstance(own, Failure) else DONE_S)
        for rank, answer in enumerate(answers, start=1):
            if answer != own:
                self._ranks.fail(f"rank {rank} answered {answer!r}, rank 0 {own!r}")


def load_replica(config: ReplicaConfig) -> Replica | ParallelReplica:
    """The replica that `config` describes, on one device or on several."""
    return Replica.load(config) if config.tensor_parallel == 1 else load_parallel(config)


def load_parallel(config: ReplicaConfig) -> ParallelReplica:
    """Load the pair on `tensor_parallel` devices of this machine, one process each.

    Raises what `Replica.load` raises, whichever rank met it.
    """
    count = config.tensor_parallel
    files = read_pair(config)
    try:
        check_divisible(files.target_config, count)
    except NotDivisible as error:
        raise PairRefused(f"tensor_parallel: {error}") from None
    if resolve_device(config.device).type == "cuda" and torch.cuda.device_count() < count:
        raise PairRefused(
            f"tensor_parallel: {count} devices are asked for, {torch.cuda.device_count()} are here"
        )
    folder = tempfile.TemporaryDirectory(prefix="lockstep-ranks-")
    meeting = Path(folder.name, "meeting").as_uri()
    context = multiprocessing.get_context("spawn")
    others: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for rank in range(1, count):
            ours, theirs = context.Pipe()
            others.append(ours)
            with theirs:  # closed here, or its end would not be noticed
                process = context.Process(
                    target=_follow, args=(config, rank, meeting, theirs), daemon=True
                )
                process.start()
            processes.append(process)
    except BaseException:
        # Those that have begun meet nobody.
        for process in processes:
            process.kill()
            process.join()
        for ours in others:
            ours.close()
        folder.cleanup()
        raise
    ranks = Ranks(others, processes)
    try:
        replica = _load(config, 0, meeting, lambda: _all_here(ranks), lambda p: _least(p, ranks))
        parallel = ParallelReplica(replica, ranks, folder)
        if ranks.broken is not None:
            raise ranks.broken
        if config.calibrate:
            parallel.spec = dataclasses.replace(parallel.spec, timings=calibrate(parallel))
    except BaseException as error:
        for process in processes:
            process.kill()
        ranks.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        folder.cleanup()
        if ranks.broken is not None and isinstance(error, RuntimeError):
            raise PairRefused(f"tensor_parallel: {ranks.broken}") from error
        raise
    return parallel


def _load(
    config: ReplicaConfig,
    rank: int,
    meeting: str,
    arrive: Callable[[], None],
    agree: Callable[[MemoryPlan], MemoryPlan],
) -> Replica:
    """This rank's replica, with the memory plan that all ranks agree on."""
    device = resolve_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    arrive()
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


def _all_here(ranks: Ranks) -> None:
    """Nothing ends the wait for a rank that never comes to the meeting, so none begins it then."""
    _loaded(ranks)
    ranks.begin()


def _loaded(ranks: Ranks) -> list[object]:
    """The ranks' answers while they load; raises ReplicaBroken where one could not."""
    answers = ranks.collect()
    for rank, answer in enumerate(answers, start=1):
        if isinstance(answer, Failure):
            ranks.fail(f"rank {rank} failed with {answer.kind}: {answer.message}")
    return answers


def _least(own: MemoryPlan, ranks: Ranks) -> MemoryPlan:
    """The plan of the rank with the least room, sent to all: sizes decide how orders are cut up."""
    plans = [own]
    for answer in _loaded(ranks):
        assert isinstance(answer, MemoryPlan)
        plans.append(answer)
    least = min(plans, key=lambda plan: (plan.work.rows, plan.work.pass_tokens, plan.kv_blocks))
    blocks = min(plan.kv_blocks for plan in plans)
    least = dataclasses.replace(least, kv_blocks=blocks)
    ranks.tell(least)
    return least


def _follow(config: ReplicaConfig, rank: int, meeting: str, caller: Connection) -> None:
    """A further rank's process: load, then do what rank 0 says until it goes."""

    def agree(plan: MemoryPlan) -> MemoryPlan:
        caller.send(plan)
        agreed: MemoryPlan = caller.recv()
        return agreed

    try:
        try:
            replica = _load(config, rank, meeting, lambda: caller.send(_HERE), agree)
        except Exception as error:  # whatever it is, nobody else can say it
            caller.send(Failure.of(error))
            raise
        while True:
            message = caller.recv()
            if not isinstance(message, Order):
                replica.release(message)
                continue
            try:
                answer: object = _committed(replica.step(message, caller.recv))
            except Exception as error:
                answer = Failure.of(error)
            caller.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # rank 0 has gone


def _committed(result: StepResult) -> list[tuple[str, tuple[int, ...]]]:
    return [(row.sequence_id, row.tokens) for row in result.rows]
