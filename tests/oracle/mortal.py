"""A world with all that a request may live through: prompts filled in chunks, prefixes that several
share, blocks that run out, batches that fail in the middle and run again, replicas that die."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.local.engine import REPLICA_ID, LocalEngine, Output
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import ReplicaJoined, ReplicaLost, Request
from tests.replicas.pool import Failing

TIGHT = 64
"""Blocks: one sequence of full length."""


class Mortal(LocalEngine):
    """Its replica may die, and a new one comes that knows nothing."""

    def __init__(self, load: Callable[[], Replica], config: SchedulerConfig) -> None:
        """`load` makes replicas of TIGHT blocks."""
        self._load = load
        self._rows_max = config.rows_max
        self.replica = load()
        super().__init__(Failing(self.replica, share=0.25), config, check=True)

    def kill(self) -> None:
        """What its batches would have committed is lost."""
        self._batches.clear()
        self._feed(ReplicaLost(REPLICA_ID, by_batch=False))
        self.replica = self._load()
        self._runner = Failing(self.replica, share=0.25)
        self._feed(ReplicaJoined(REPLICA_ID, self.replica.spec))

    def live(self, requests: Sequence[Request]) -> list[Output]:
        """What the requests receive, through all of it."""
        for at, request in enumerate(requests):
            self.submit(request)
            for _ in range(at % 3):
                self.advance()
            if at % 9 == 8:
                self.kill()
        self.run()
        outputs = [self.outputs[request.id] for request in requests]
        self.replica.check_integrity()
        assert (self.replica.residents, self.replica.free_blocks) == ((), TIGHT)
        found = sum(output.usage.cached_tokens for output in outputs)
        assert found > 200, found
        assert self._rows_max == 1 or self.scheduler.snapshot().preempted > 0
        assert sum(output.usage.recovered for output in outputs) > 0
        return outputs
