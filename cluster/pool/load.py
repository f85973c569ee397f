"""What a frontend knows of a pool's load between two messages of the pool."""

from __future__ import annotations

from itertools import islice

from cluster.pool.protocol import PoolState
from scheduler.scaling import ShardLoad


class LoadEstimate:
    """What the pool has said last, and the requests of one session that this does not include.

    The pool confirms requests in the order in which they were sent.
    """

    def __init__(self) -> None:
        self.said = ShardLoad(length_max=0)
        self.unconfirmed_tokens = 0
        self._unconfirmed: dict[str, int] = {}
        """What requests that the pool has not confirmed may commit, by their ids, the oldest
        first."""
        self._confirmed = 0

    @property
    def outstanding_tokens(self) -> float:
        """Tokens that it is expected to commit."""
        return self.said.outstanding_tokens + self.said.expected_share * self.unconfirmed_tokens

    def add(self, pool_id: str, tokens: int) -> None:
        """A request that is sent, or waits to be."""
        self._unconfirmed[pool_id] = tokens
        self.unconfirmed_tokens += tokens

    def remove(self, pool_id: str) -> None:
        """A request that was never sent."""
        self.unconfirmed_tokens -= self._unconfirmed.pop(pool_id)

    def confirm(self, state: PoolState) -> list[str]:
        """The ids of the requests that the pool has received since it spoke last."""
        count = state.submits - self._confirmed
        confirmed = list(islice(self._unconfirmed, count))
        assert len(confirmed) == count, "the pool confirms what was sent, once"
        for pool_id in confirmed:
            self.remove(pool_id)
        self._confirmed = state.submits
        self.said = state.load
        return confirmed

    def start_over(self) -> None:
        """Another session begins, of which the pool has confirmed nothing."""
        self._unconfirmed.clear()
        self.unconfirmed_tokens = self._confirmed = 0
