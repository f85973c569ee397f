"""What a frontend keeps of the pools: a session with each, and every unfinished request."""

from cluster.frontend.pool_session.audit import Audit
from cluster.frontend.pool_session.in_flight import InFlightRequest
from cluster.frontend.pool_session.session import PoolSession
from cluster.frontend.pool_session.shard_router import ShardRouter
