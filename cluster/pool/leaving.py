"""When a replica that wants to go may: not while a request needs just this one.

The last replica of a pool stays until what runs has ended, if the one in its place starts only
then; new requests are refused meanwhile, and until that one is there. If clients are being led to
another pool, it serves until they are there. All within the grace that Serve gives it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from cluster.config import ClusterConfig
from cluster.pool.peers import WorkerPeer
from cluster.pool.protocol import REPLACED, STOPPING, Successor
from scheduler.messages import Submit

log = logging.getLogger("lockstep.pool")

_SETTLE_S = 5.0
"""How long a last replica stays, though nothing runs, while another pool takes this one's place."""
_GRACE_SHARE = 0.9
"""Of the grace of a replica: then what runs is handed back, before Serve kills it."""


class Leaving:
    """What a pool knows of it. Reads no clock."""

    def __init__(self, config: ClusterConfig) -> None:
        self._grace_s = _GRACE_SHARE * config.actors.drain_s
        self._keeps_replicas = config.replicas_min > 0
        self.awaits_successor = False
        """The last replica has gone, or wants to, so that another one can start."""

    def refuses(self, submit: Submit, stopping: bool) -> str:
        """Why a request is not taken now; empty if it is, as one that was admitted before."""
        if submit.admitted_before:
            return ""
        return STOPPING if stopping else REPLACED if self.awaits_successor else ""

    def due(
        self,
        workers: Mapping[str, WorkerPeer],
        has_frontends: bool,
        unfinished: int,
        now_s: float,
        stopping: bool,
    ) -> list[str]:
        """Those that may go now, of those that want to, and drain from now on. `unfinished`:
        requests."""
        found = []
        last = all(peer.successor is not None for peer in workers.values())
        self.awaits_successor &= last
        for replica_id, worker in workers.items():
            if worker.successor is None or worker.draining:
                continue
            going_s = now_s - worker.going_s
            if stopping or not (last and self._stays(worker, has_frontends, unfinished, going_s)):
                log.info("replica %s drains", replica_id)
                worker.draining = True
                found.append(replica_id)
            elif not worker.held:
                worker.held = True
                log.info("replica %s is the last one and stays while requests run", replica_id)
        return found

    def _stays(
        self, worker: WorkerPeer, has_frontends: bool, unfinished: int, going_s: float
    ) -> bool:
        if worker.successor is Successor.NONE:
            return False
        after = worker.successor is Successor.AFTER
        if after and self._keeps_replicas:
            self.awaits_successor = True
        if going_s > self._grace_s:
            return False
        if after:
            return bool(unfinished)
        # Frontends of this pool get calls until Serve's proxies know those of the next one.
        return has_frontends and (bool(unfinished) or going_s <= _SETTLE_S)
